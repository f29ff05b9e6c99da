"""Summarization and text-to-text tasks: learned, scored, saved and used again; what tells one task from another."""

import importlib
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from remote_process import RemotePython
from transformers import BartConfig, MarianConfig, T5Config, pipeline

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.streams import stream_parallel_corpus
from vanilla_transformer.hub import checks
from vanilla_transformer.hub.card import build_model_card
from vanilla_transformer.inference.evaluate import score_summaries
from vanilla_transformer.tasks import (
    TASKS,
    TRANSLATION,
    find_prefix,
    find_task,
    get_task,
    record_directions,
    record_task,
)
from vanilla_transformer.training.arguments import DataArguments, ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.examples import load_corpora
from vanilla_transformer.training.setup import settle_prefix, settle_training_arguments

DAYS = ("Monday", "Tuesday", "Friday")
GOODS = ("chairs", "tables", "lamps", "books")
PREFIX = "summarize: "
SUMMARIZATION, TEXT2TEXT = TASKS["summarization"], TASKS["text2text"]
T5_TASKS: dict[str, Any] = {
    "summarization": {"prefix": "summarize: ", "num_beams": 4},
    "translation_en_to_de": {"prefix": "translate English to German: "},
    "translation_en_to_fr": {"prefix": "translate English to French: "},
}


def make_t5(config_class: Any = T5Config, **fields: Any) -> Any:
    """A configuration with T5's tasks."""
    return config_class(task_specific_params=T5_TASKS, **fields)


def write_report(rng: random.Random) -> tuple[str, str]:
    """A week's sales, and the last day of them."""
    days = [day for day in DAYS if rng.random() < 0.8] or ["Monday"]
    counts = [rng.randrange(1, 16) for _ in days]
    goods = rng.choice(GOODS)
    report = " ".join(f"On {day} the shop sold {count} {goods}." for day, count in zip(days, counts, strict=True))
    return report, f"Last day: {days[-1]}, {counts[-1]} {goods}."


def run_script(name: str, *words: object, **options: object) -> None:
    """Runs a script as Python does, within this process."""
    arguments = [str(word) for word in words]
    for option, value in options.items():
        arguments += [f"--{option}", str(value)]
    importlib.import_module(name).main(arguments)


def train(files: dict[str, str], output_dir: Path, **options: object) -> None:
    sizes = "d_model=48,encoder_ffn_dim=96,decoder_ffn_dim=96,encoder_layers=2,decoder_layers=1"
    options |= {"preset": "tiny", "config_overrides": f"{sizes},dropout=0.0,label_smoothing=0.0", "vocab_size": 400}
    options |= {"train_file": files["train"], "validation_file": files["validation"], "output_dir": output_dir}
    options |= {"per_device_train_batch_size": 32, "learning_rate": 4e-3, "warmup_steps": 60}
    run_script("train", "--use_cpu", lr_scheduler_type="linear", disable_tqdm=True, report_to="none", **options)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of JSON lines; no report comes twice, in whichever of them."""
    rng, pairs = random.Random(0), dict[str, str]()
    while len(pairs) < 1100:
        source, target = write_report(rng)
        pairs.setdefault(source, target)
    rows = [json.dumps({"document": source, "summary": target}) + "\n" for source, target in pairs.items()]
    folder, files = tmp_path_factory.mktemp("reports"), {}
    for name, lines in {"test": rows[:80], "validation": rows[80:100], "train": rows[100:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        files[name] = str(folder / f"{name}.jsonl")
    return files


@pytest.fixture(scope="module")
def summarizer(reports: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained and scored by the scripts."""
    folder = tmp_path_factory.mktemp("models") / "summaries"
    train(reports, folder, task="summarization", source_prefix=PREFIX, num_train_epochs=4)
    scored = {"model_name_or_path": folder, "test_file": reports["test"], "output_dir": folder / "test"}
    run_script("evaluate_translation", "--disable_tqdm", device="cpu", **scored)
    return folder


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class TestSummarization:
    def test_it_is_learned(self, summarizer: Path, reports: dict[str, str]) -> None:
        rows = read_rows(reports["test"])
        references = [row["summary"] for row in rows]
        lead = score_summaries([row["document"].partition(". ")[0] for row in rows], references)
        found = json.loads((summarizer / "test" / "metrics.json").read_text())
        assert lead["rougeL"] < 40
        assert found["rougeL"] > 80, "the form, and mostly the right day"
        assert found["rouge2"] > 60 > lead["rouge2"]
        assert found["exact_match"] > 35
        assert "bleu" not in found
        assert (found["task"], found["source_prefix"]) == ("summarization", PREFIX)
        saved = read_rows(str(summarizer / "test" / "texts.jsonl"))
        assert [row["source"] for row in saved] == [row["document"] for row in rows]
        assert [row["reference"] for row in saved] == references
        expected = score_summaries([row["hypothesis"] for row in saved], references)
        assert {name: found[name] for name in expected} == expected

    def test_the_best_checkpoint_is_that_by_rouge(self, summarizer: Path) -> None:
        state = json.loads((summarizer / "trainer_state.json").read_text())
        scores = [entry["eval_rougeL"] for entry in state["log_history"] if "eval_rougeL" in entry]
        assert state["best_metric"] == max(scores)
        best = json.loads((summarizer / "eval_results.json").read_text())
        assert best["eval_rougeL"] == pytest.approx(max(scores))
        assert {"eval_rouge1", "eval_rouge2", "eval_rougeLsum", "eval_exact_match", "eval_gen_len"} <= best.keys()

    def test_the_pipeline_puts_the_prefix_too(
        self, summarizer: Path, reports: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        make_pipeline: Any = pipeline
        summarize = make_pipeline("summarization", model=str(summarizer), device="cpu")
        assert summarize.prefix == PREFIX
        sources = [row["document"] for row in read_rows(reports["test"])[:20]]
        with caplog.at_level(logging.WARNING):
            found = [output["summary_text"] for output in summarize(sources)]
            assert "max_length" not in caplog.text, "the model's own bound is no wish for a long summary"
            summarize(sources[0], max_new_tokens=100)
            assert "Your max_length is set to 100" in caplog.text
        assert found == (summarizer / "test" / "hypotheses.txt").read_text().splitlines()[:20]

    def test_the_script_that_translates_does_too(
        self, summarizer: Path, reports: dict[str, str], tmp_path: Path
    ) -> None:
        (tmp_path / "in.txt").write_text("".join(row["document"] + "\n" for row in read_rows(reports["test"])[:9]))
        options = {"input_file": tmp_path / "in.txt", "output_file": tmp_path / "out.txt", "device": "cpu"}
        options["model_name_or_path"] = summarizer
        run_script("translate", "--disable_tqdm", **options)
        found = (tmp_path / "out.txt").read_text().splitlines()
        assert found == (summarizer / "test" / "hypotheses.txt").read_text().splitlines()[:9]
        run_script("translate", "--disable_tqdm", "--overwrite", source_prefix="x y z ", **options)
        assert (tmp_path / "out.txt").read_text().splitlines() != found, "what is given wins"

    def test_it_is_used_without_the_package_too(
        self,
        summarizer: Path,
        reports: dict[str, str],
        without_the_package: RemotePython,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        program = """
from transformers import pipeline
[each["summary_text"] for each in pipeline("summarization", folder, trust_remote_code=True, device="cpu")(texts)]
"""
        texts = [row["document"] for row in read_rows(reports["test"])[:3]]
        found_there = without_the_package.run(program, folder=str(summarizer), texts=texts)
        assert found_there == (summarizer / "test" / "hypotheses.txt").read_text().splitlines()[:3]
        # What a push tries in a process of its own has just been tried.
        monkeypatch.setattr(checks, "_try_without_the_package", lambda *_: ())
        found = checks.inspect_model_folder(summarizer, card=build_model_card(summarizer, license="mit").content)
        assert found.problems == []
        assert found.task is SUMMARIZATION
        assert found.is_self_contained
        tasks = json.loads((summarizer / "config.json").read_text())["custom_pipelines"]
        assert list(tasks) == ["summarization"]
        assert tasks["summarization"]["impl"] == "pipeline_vanilla_transformer.SummarizationPipeline"
        assert json.loads((summarizer / "generation_config.json").read_text())["max_new_tokens"] == 128
        assert VanillaTransformerTokenizer.from_pretrained(summarizer).model_max_length == 1024

    def test_the_card_speaks_of_summaries(self, summarizer: Path) -> None:
        card = build_model_card(summarizer, repo_id="user/summaries")
        data: Any = card.data
        assert data.pipeline_tag == "summarization"
        assert "summarization" in data.tags
        names = {result.metric_name.partition(" ")[0] for result in data.eval_results}
        assert names == {"ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum"}
        assert {result.task_type for result in data.eval_results} == {"summarization"}
        assert 'summarize = pipeline("summarization", model="user/summaries"' in card.text
        assert "| put before each source | `summarize:` |" in card.text
        assert "that summarizes texts" in card.text
        assert "translat" not in card.text

    def test_a_run_with_another_task_does_not_go_on_with_it(
        self, summarizer: Path, reports: dict[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            train(reports, summarizer, task="text2text", source_column="document", target_column="summary")
        assert "task: 'summarization' there, 'text2text' now" in capsys.readouterr().err


def test_text2text_is_trained_in_the_same_way(reports: dict[str, str], tmp_path: Path) -> None:
    columns = {"source_column": "document", "target_column": "summary"}
    folder = tmp_path / "orders"
    train(reports, folder, task="text2text", max_steps=2, max_target_length=16, **columns)
    generate: Any = pipeline("text2text-generation", model=str(folder), device="cpu")  # type: ignore[call-overload]
    (output,) = generate("a b", max_new_tokens=3)
    assert isinstance(output["generated_text"], str)
    config = json.loads((folder / "config.json").read_text())
    assert list(config["custom_pipelines"]) == ["text2text-generation"]
    assert "eval_chrf" in json.loads((folder / "eval_results.json").read_text())
    assert build_model_card(folder).data.to_dict()["pipeline_tag"] == "text2text-generation"


class TestConfiguration:
    @pytest.mark.parametrize("make", [VanillaTransformerConfig, BartConfig, MarianConfig])
    @pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
    def test_what_is_recorded_is_found_again(self, make: Any, task: Any, tmp_path: Path) -> None:
        langs = ["en", "de"] if task is TRANSLATION else None
        config = make()
        record_task(config, task, prefix="do it: ", langs=langs)
        config.save_pretrained(tmp_path)
        again = type(config).from_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        for found in (again, saved):
            assert find_task(found) is task
            assert find_prefix(found, task, langs=langs) == "do it: "
            assert find_prefix(found, task) == "do it: "
            assert find_prefix(found, TEXT2TEXT if task is not TEXT2TEXT else TRANSLATION) == ""

    def test_one_pair_of_languages_needs_no_name(self) -> None:
        config: Any = VanillaTransformerConfig()
        record_directions(config, {("en", "de"): "<2de> "})
        assert find_prefix(config, TRANSLATION) == "<2de> "
        assert find_prefix(config, SUMMARIZATION) == ""
        record_directions(config, {("en", "de"): "<2de> ", ("de", "en"): "<2en> "})
        assert find_prefix(config, TRANSLATION) == ""

    def test_a_prefix_that_training_changes_is_changed_for_the_languages_too(self) -> None:
        """Though a later training does not name them: they are the model's."""
        config: Any = VanillaTransformerConfig(langs=["en", "de"])
        record_task(config, TRANSLATION, prefix="A: ", langs=["en", "de"])
        for prefix in ("B: ", ""):
            record_task(config, TRANSLATION, prefix=prefix)
            assert [find_prefix(config, TRANSLATION, langs=langs) for langs in (None, ["en", "de"])] == [prefix] * 2

    def test_a_model_for_translation_says_nothing_and_of_several_tasks_none_is_the_one(self) -> None:
        config: Any = VanillaTransformerConfig(langs=["en", "de"])
        record_task(config, TRANSLATION, langs=["en", "de"])
        assert getattr(config, "task_specific_params", None) is None
        assert find_task(config) is TRANSLATION
        assert [*config.custom_pipeline_tasks] == ["translation", "translation_en_to_de"]
        config = make_t5()
        assert find_task(config) is TRANSLATION
        assert find_prefix(config, TRANSLATION) == ""
        assert find_prefix(config, TRANSLATION, langs=["en", "fr"]) == "translate English to French: "
        assert find_prefix(config, SUMMARIZATION) == "summarize: "
        several = make_t5(VanillaTransformerConfig, langs=["en", "de"])
        pipelines = {name: entry["impl"].partition(".")[2] for name, entry in several.custom_pipeline_tasks.items()}
        translations = ("translation", "translation_en_to_de", "translation_en_to_fr")
        expected = {"summarization": "SummarizationPipeline", **dict.fromkeys(translations, "TranslationPipeline")}
        assert pipelines == expected

    def test_training_further_keeps_the_task_and_drops_the_others(self, tmp_path: Path) -> None:
        make_t5().save_pretrained(tmp_path)
        model = ModelArguments(model_name_or_path=str(tmp_path))
        data = DataArguments(task="summarization", train_file=["a.jsonl"])
        assert settle_prefix(model, data) == "summarize: "
        assert settle_prefix(model, DataArguments(task="text2text", train_file=["a.jsonl"])) == ""
        german = DataArguments(train_file=["a.tsv"], source_lang="en", target_lang="de")
        assert settle_prefix(model, german) == "translate English to German: "
        given = DataArguments(task="summarization", train_file=["a.jsonl"], source_prefix="")
        assert settle_prefix(model, given) == ""
        assert settle_prefix(ModelArguments(preset="tiny"), data) == ""

        config = make_t5()
        record_task(config, SUMMARIZATION, prefix="tldr: ")
        assert config.task_specific_params == {"summarization": {"prefix": "tldr: ", "num_beams": 4}}
        assert T5_TASKS["summarization"]["prefix"] == "summarize: ", "what was given is not changed"
        config = make_t5()
        record_task(config, TRANSLATION, prefix="German: ", langs=["en", "de"])
        assert {name: entry["prefix"] for name, entry in config.task_specific_params.items()} == {
            "translation": "German: ",
            "translation_en_to_de": "German: ",
            "translation_en_to_fr": "translate English to French: ",
        }
        record_task(config, TEXT2TEXT)
        assert config.task_specific_params == {"text2text-generation": {}}


class TestArguments:
    def test_lengths_are_those_of_the_task(self) -> None:
        assert DataArguments(builtin_corpus=True).lengths == (256, 256)
        assert DataArguments(task="summarization", train_file=["a.jsonl"]).lengths == (1024, 128)
        given = DataArguments(task="summarization", train_file=["a.jsonl"], max_source_length=50, max_target_length=9)
        assert given.lengths == (50, 9)

    @pytest.mark.parametrize(
        ("task", "changes", "message"),
        [
            ("poetry", {}, "task='poetry': must be one of translation, summarization, text2text"),
            ("summarization", {"builtin_corpus": True, "train_file": None}, "builtin_corpus belongs to the task"),
            ("text2text", {"source_lang": "en", "target_lang": "de"}, "source_lang, target_lang belong to the task tr"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, task: str, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DataArguments(**{"task": task, "train_file": ["a.jsonl"], **changes})

    def test_the_best_checkpoint_is_by_the_task(self, tmp_path: Path) -> None:
        def choose(task: str, **options: Any) -> TranslationTrainingArguments:
            arguments = TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **options)
            config = VanillaTransformerConfig.from_preset("tiny")
            settle_training_arguments(arguments, config, validates=True, task=get_task(task))
            return arguments

        for expected, task, options in (
            ("chrf", "translation", {}),
            ("rougeL", "summarization", {}),
            ("chrf", "text2text", {}),
            ("eval_rouge2", "summarization", {"metric_for_best_model": "eval_rouge2"}),
            ("exact_match", "text2text", {"metric_for_best_model": "exact_match"}),
            ("loss", "summarization", {"predict_with_generate": False}),
            (None, "summarization", {"average_checkpoints": 2}),
        ):
            arguments = choose(task, **options)
            assert arguments.metric_for_best_model == expected
            assert expected in (None, "loss") or arguments.greater_is_better
        message = "metric_for_best_model=bleu: must be one of rouge1, rouge2, rougeL"
        with pytest.raises(ValueError, match=message):
            choose("summarization", metric_for_best_model="bleu")


class TestData:
    def write(self, folder: Path, columns: tuple[str, ...], kind: str) -> Path:
        rows = [{name: f"{name} {number}" for name in columns} for number in range(5)]
        table = ["\t".join(columns), *("\t".join(row.values()) for row in rows)]
        path = folder / f"rows.{kind}"
        path.write_text("\n".join(table if kind == "tsv" else map(json.dumps, rows)) + "\n")
        return path

    @pytest.mark.parametrize("kind", ["jsonl", "tsv"])
    def test_usual_columns_are_found(self, kind: str, tmp_path: Path) -> None:
        for task, columns, expected in (
            (SUMMARIZATION, "id article highlights", ("article", "highlights")),
            (SUMMARIZATION, "document summary source target", ("source", "target")),
            (TEXT2TEXT, "id output input", ("input", "output")),
        ):
            path = self.write(tmp_path, tuple(columns.split()), kind)
            for load in (load_parallel_corpus, stream_parallel_corpus):
                (first, *_) = load(files=[path], usual_columns=task.columns)
                assert first == {"source": f"{expected[0]} 0", "target": f"{expected[1]} 0"}

    @pytest.mark.parametrize("kind", ["jsonl", "tsv"])
    def test_of_several_usual_pairs_none_is_guessed(self, kind: str, tmp_path: Path) -> None:
        path = self.write(tmp_path, ("article", "document", "summary"), kind)
        both = "'document' and 'summary', or 'article' and 'summary'"
        with pytest.raises(ValueError, match=f"{path.name}, line 1: the texts may be {both}"):
            load_parallel_corpus(files=[path], usual_columns=SUMMARIZATION.columns)
        columns: Any = {"source_column": "article", "target_column": "summary"}
        named = load_parallel_corpus(files=[path], usual_columns=SUMMARIZATION.columns, **columns)
        assert named[0]["source"] == "article 0"

    @pytest.mark.parametrize("streaming", [False, True])
    def test_the_prefix_stands_before_every_source(self, streaming: bool, tmp_path: Path) -> None:
        path = self.write(tmp_path, ("text", "summary"), "jsonl")
        files: Any = {"train_file": [str(path)], "validation_file": [str(path)]}
        arguments = DataArguments(task="summarization", streaming=streaming, **files)
        expected = [{"source": f"summarize: text {number}", "target": f"summary {number}"} for number in range(5)]
        for dataset in load_corpora(arguments, source_prefix=PREFIX).values():
            assert [*dataset] == expected
