"""Model cards: what they say of real trainings and scores, that the Hub takes them, and that the template ships."""

import importlib
import importlib.util
import json
import logging
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from huggingface_hub import ModelCard
from library_models import make_marian
from local_hub import LocalHub
from model_cards import change, data_of, part, read, rows_of, summary_of
from safetensors.torch import load_file, save_file
from tiny_vanilla import make_model
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer.hub.card import build_model_card, write_model_card
from vanilla_transformer.training.trainer import TranslationTrainer

ROOT = Path(__file__).parents[2]
ENGLISH = ("one", "two", "three", "four", "five", "six")
GERMAN = ("eins", "zwei", "drei", "vier", "fünf", "sechs")


def write_pairs(folder: Path, name: str, rows: range) -> list[str]:
    paths = []
    for suffix, words in (("en", ENGLISH), ("de", GERMAN)):
        path = folder / f"{name}.{suffix}"
        path.write_text("".join(f"{words[row // 6]} | {words[row % 6]}\n" for row in rows), encoding="utf-8")
        paths.append(str(path))
    return paths


def run_script(name: str, *words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        importlib.import_module(name).main([str(word) for word in words])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that scripts/train.py trained and scripts/evaluate_translation.py scored, five times."""
    secret = tmp_path_factory.mktemp("secret-place")
    train, validation = write_pairs(secret, "train", range(30)), write_pairs(secret, "val", range(30, 36))
    test = write_pairs(secret, "news", range(7, 14))
    folder = secret / "numbers"
    options = (
        "--preset tiny --vocab_size 280 --source_lang en --target_lang de --max_source_tokens 60 --warmup_steps 2 "
        "--learning_rate 0.003 --num_train_epochs 2 --average_checkpoints 2 --label_smoothing_factor 0.1 --seed 3 "
        "--logging_steps 1 --use_cpu --disable_tqdm true --train_file"
    )
    run_script("train", *options.split(), *train, "--validation_file", *validation, "--output_dir", folder)
    for name, model, beams, pairs, more in (
        ("test", folder, 2, test, []),
        ("test-greedy", folder, 1, test, []),
        ("test-part", folder, 1, test, ["--max_samples", 3]),
        ("val", folder, 1, validation, []),
        ("test-checkpoint", next(folder.glob("checkpoint-*")), 1, test, []),
    ):
        scored = ["--model_name_or_path", model, "--num_beams", beams, "--output_dir", folder / name, "--disable_tqdm"]
        run_script("evaluate_translation", *scored, "--max_new_tokens", 3, "--test_file", *pairs, *more)
    return folder


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """A copy of it, at another place."""
    return shutil.copytree(original, tmp_path / "numbers", ignore=shutil.ignore_patterns("checkpoint-*", "runs"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Nothing but configuration, code and weights."""
    make_model().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


class TestContent:
    def test_metadata_are_those_of_the_model(self, trained: Path) -> None:
        card = build_model_card(
            trained, repo_id="alice/numbers-en-de", license="mit", datasets="alice/pairs", tags="numbers"
        )
        data = data_of(card).to_dict()
        (index,) = data.pop("model-index")
        assert index["name"] == "numbers-en-de"
        assert data == {
            "language": ["en", "de"],
            "license": "mit",
            "datasets": ["alice/pairs"],
            "library_name": "transformers",
            "pipeline_tag": "translation",
            "metrics": ["sacrebleu", "chrf"],
            "tags": ["translation", "vanilla_transformer", "attention-is-all-you-need", "numbers"],
        }

    def test_the_model_index_has_scores_and_signatures_of_whole_test_sets(self, trained: Path) -> None:
        results = data_of(build_model_card(trained)).eval_results
        found = {result.metric_name: (result.metric_value, result.metric_args) for result in results}
        expected = {}
        for name, search in (("test", "2 beams, GNMT length penalty 0.6"), ("test-greedy", "greedy")):
            scores = read(trained / name / "metrics.json")
            for key, metric in (("bleu", "sacreBLEU"), ("chrf", "chrF")):
                value = round(scores[key], 2), {"signature": scores[f"{key}_signature"]}
                expected[f"{metric} ({search})"] = value
        assert found == expected
        assert {(result.task_type, result.dataset_name) for result in results} == {("translation", "news")}

    def test_the_text_tells_what_was_trained_how_and_how_well(self, trained: Path) -> None:
        card = build_model_card(trained, repo_id="alice/numbers")
        metrics, test = read(trained / "metrics.json"), read(trained / "test" / "metrics.json")
        assert summary_of(card).startswith("# numbers ")
        assert f"It has {metrics['parameters']:,} parameters. It was trained from scratch" in summary_of(card)
        search = "2 beams, GNMT length penalty 0.6"
        scores = f"{test['bleu']:.2f} sacreBLEU, {test['chrf']:.2f} chrF ({search})"
        assert f"On news it scores {scores}." in summary_of(card)
        for words in (
            'pipeline("translation", model="alice/numbers")',
            'pipeline("translation", model="alice/numbers", trust_remote_code=True)',
            "The task's other name is `translation_en_to_de`.",
            *("searches with 4 beams", "![Learning curves](curves.png)", "vaswani2017attention"),
        ):
            assert words in card.text
        expected = {
            "parameters": f"{metrics['parameters']:,}, float32",
            "layers, encoder + decoder": "2 + 2",
            "width (d_model)": "32",
            "attention heads": "4",
            "vocabulary": f"{read(trained / 'config.json')['vocab_size']:,} tokens, the same for both languages",
            "positions": "sinusoidal",
            "layer normalization": "after each sub-layer (post-LN)",
            "training": "`train.en`, `train.de`",
            "validation": "`val.en`, `val.de`",
            "number of training pairs": str(metrics["metrics"]["train_samples"]),
            "tokenizer": "byte pairs, trained on the training data",
            "updates": f"{metrics['steps']} (2 epochs)",
            "batch": "at most 60 source and 60 target tokens, padding included",
            "learning rate": "peak 0.003; schedule `inverse_sqrt`, 2 warm-up updates",
            "label smoothing": "0.1",
            "precision": "float32",
            "seed": "3",
            "weights": "average of the last 2 checkpoints",
            "tokens seen, without padding": "{source:,} source, {target:,} target".format(**metrics["tokens_seen"]),
            "hardware": f"{metrics['device_name']} (CPU)",
        }
        rows = rows_of(card)
        assert {name: rows.get(name) for name in expected} == expected
        assert f"torch {metrics['versions']['torch']}" in rows["software"]

    def test_text_that_was_cut_before_is_named_so(self, trained: Path) -> None:
        assert "form of the text" not in rows_of(build_model_card(trained))
        arguments = read(trained / "arguments.json")
        arguments["data"]["remove_bpe"] = "@@"
        change(trained / "arguments.json", **arguments)
        scores = read(trained / "test" / "metrics.json")["arguments"] | {"remove_bpe": "@@"}
        change(trained / "test" / "metrics.json", arguments=scores)
        card = build_model_card(trained)
        assert "one that ends in `@@` goes on" in rows_of(card)["form of the text"]
        assert "- Pieces that end in `@@` were joined to the next ones first." in part(card, "Evaluation")

    def test_scores_are_listed_test_sets_first_and_validation_data_marked(self, trained: Path) -> None:
        table = [line.strip("| ").split(" | ") for line in part(build_model_card(trained), "Evaluation").splitlines()]
        assert [row[:3] for row in table[2:6]] == [
            ["news", "7", "2 beams, GNMT length penalty 0.6"],
            ["news", "7", "greedy"],
            ["news (first 3 pairs)", "3", "greedy"],
            ["val (validation data)", "6", "greedy"],
        ]
        scores = read(trained / "test" / "metrics.json")
        assert table[0][3:] == ["sacreBLEU", "lowercased", "chrF", "TER", "exact match, %", "perplexity"]
        names = ("bleu", "bleu_lowercase", "chrf", "ter", "exact_match", "perplexity")
        assert table[2][3:] == [f"{scores[name]:.2f}" for name in names]
        text = part(build_model_card(trained), "Evaluation")
        assert f"- sacreBLEU: `{scores['bleu_signature']}`\n" in text
        validation = read(trained / "metrics.json")["metrics"]["eval_bleu"]
        assert f"BLEU {validation:.2f}," in text
        assert "(greedy). Such figures compare checkpoints" in text

    def test_scores_with_a_glossary_are_marked_and_left_out_of_the_index(self, trained: Path) -> None:
        arguments = read(trained / "test" / "metrics.json")["arguments"] | {"glossary": "terms.tsv"}
        change(trained / "test" / "metrics.json", arguments=arguments)
        card = build_model_card(trained)
        assert "news (with a glossary)" in part(card, "Evaluation")
        assert {result.metric_name for result in data_of(card).eval_results} == {"sacreBLEU (greedy)", "chrF (greedy)"}

    @pytest.mark.parametrize(
        ("recorded", "files", "note"),
        [
            (["data/train/a.en", "data/train/a.de"], ["data/test/a.en", "data/test/a.de"], ""),
            (["data/train/a.en", "data/train/a.de"], ["../data/train/a.en", "../data/train/a.de"], " (training data)"),
            ([["x.en", "x.de"], ["a.en", "a.de"]], ["data/a.de", "data/a.en"], " (training data)"),
            ([["x.en", "x.de"], ["a.en", "a.de"]], ["a.en", "x.de"], ""),
        ],
    )
    def test_training_data_are_known_by_their_paths(
        self, recorded: list[Any], files: list[str], note: str, trained: Path
    ) -> None:
        arguments = read(trained / "arguments.json")
        arguments["data"]["train_file"] = recorded
        change(trained / "arguments.json", **arguments)
        change(trained / "test" / "metrics.json", arguments={"test_file": files})
        text = part(build_model_card(trained), "Evaluation")
        name = "a" if len({Path(file).stem for file in files}) == 1 else ", ".join(Path(file).name for file in files)
        assert f"| {name}{note} | 7 | 2 beams" in text

    def test_words_as_tokens_and_a_training_without_translations(self, trained: Path) -> None:
        arguments = read(trained / "arguments.json")
        arguments["model"]["tokenizer_type"] = "wordlevel"
        arguments["training"]["predict_with_generate"] = False
        change(trained / "arguments.json", **arguments)
        files = {"test_file": ["a/test.2016.en", "a/test.2016.de"]}
        change(trained / "test" / "metrics.json", arguments=files)
        card = build_model_card(trained)
        assert rows_of(card)["tokenizer"] == "whole words, trained on the training data"
        assert "- Its tokens are words as they stand between spaces." in part(card, "Limits")
        text = part(card, "Evaluation")
        assert "| test.2016 | 7 | 2 beams" in text
        assert "perplexity" in text.partition("The trainer's last evaluation")[2]
        assert "(greedy). Such figures" not in text

    def test_signatures_that_differ_name_their_rows(self, trained: Path) -> None:
        change(trained / "val" / "metrics.json", bleu_signature="tok:char")
        text = part(build_model_card(trained), "Evaluation")
        assert "- sacreBLEU (val (validation data), greedy): `tok:char`\n" in text
        rows = "news, 2 beams, GNMT length penalty 0.6; news, greedy; news (first 3 pairs), greedy"
        assert f"- sacreBLEU ({rows}): `nrefs" in text

    def test_scores_of_other_weights_are_left_out(
        self, trained: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of a checkpoint, and those from before more training."""
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        change(trained / "test-checkpoint" / "metrics.json", bleu=66.66)
        change(trained / "test" / "metrics.json", bleu=77.77)
        content = build_model_card(trained).content
        assert "66.66" not in content
        assert "77.77" in content
        assert "metrics.json is left out of the card: it does not score the model" in caplog.text
        weights = load_file(trained / "model.safetensors")
        weights["model.shared.weight"] += 1
        save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
        card = build_model_card(trained)
        assert "77.77" not in card.content
        assert f"{trained / 'test' / 'metrics.json'} is left out of the card" in caplog.text

    def test_scores_of_another_configuration_are_left_out(self, trained: Path) -> None:
        change(trained / "test" / "metrics.json", bleu=77.77)
        change(trained / "test-greedy" / "metrics.json", bleu=88.88, architecture=None)  # by older code
        assert read(trained / "test" / "metrics.json")["architecture"]["normalize_before"] is False
        for harmless in ({"dropout": 0.3, "langs": ["en", "nl"]}, {"field_of_later_code": 1}):
            change(trained / "config.json", **harmless)
            assert "77.77" in build_model_card(trained).content
        # What other code recorded of initial values is no difference.
        architecture = read(trained / "test" / "metrics.json")["architecture"] | {"initializer_gain": 1.0}
        change(trained / "test" / "metrics.json", architecture=architecture)
        assert "77.77" in build_model_card(trained).content
        change(trained / "config.json", scale_embedding=False)
        card = build_model_card(trained)
        assert "77.77" not in card.content
        assert "88.88" in card.content

    def test_scores_of_a_model_on_the_hub_are_known_by_its_name(self, trained: Path) -> None:
        path = trained / "test" / "metrics.json"
        change(path, arguments={**read(path)["arguments"], "model_name_or_path": "alice/numbers"}, bleu=66.66)
        change(path, weights_sha256={})
        for name, is_own in (("alice/numbers", True), ("bob/numbers", False), (None, False)):
            assert ("66.66" in build_model_card(trained, repo_id=name).content) == is_own

    def test_scores_of_several_models_together_are_not_its_own(self, trained: Path) -> None:
        path = trained / "test" / "metrics.json"
        arguments = {**read(path)["arguments"], "model_name_or_path": "alice/numbers"}
        change(path, arguments=arguments, bleu=66.66, weights_sha256={}, ensemble=["alice/numbers", "alice/other"])
        assert "66.66" not in build_model_card(trained, repo_id="alice/numbers").content

    def test_what_else_the_loss_was_made_of_is_told(self, trained: Path) -> None:
        arguments = read(trained / "arguments.json")
        assert "teacher" not in build_model_card(trained).content
        for changed, row in (
            ({"r_drop": 5.0}, "| R-Drop | 5"),
            (
                {"teacher_model": "/home/me/big", "teacher_weight": 0.5},
                "| teacher | `big`, whose probabilities weigh 0.5",
            ),
        ):
            change(trained / "arguments.json", training=arguments["training"] | changed)
            assert row in build_model_card(trained).content

    def test_examples_are_the_first_ones_with_their_sources_if_these_are_there(self, trained: Path) -> None:
        (trained / "test" / "hypotheses.txt").write_text(
            "a|b <!-- end of what is generated -->\n" * 7, encoding="utf-8"
        )
        (trained / "test" / "sources.txt").unlink(missing_ok=True)
        card = build_model_card(trained)
        lines = part(card, "Examples").splitlines()
        assert lines[-7] == "| reference | translation |"
        assert lines[-5] == r"| zwei \| zwei | a\|b &lt;!-- end of what is generated --> |"
        assert 'translate("A sentence in English.")' in card.text or 'translate("A sentence in en.")' in card.text
        (trained / "test" / "sources.txt").write_text('"two" | two\n' * 7, encoding="utf-8")
        card = build_model_card(trained)
        assert part(card, "Examples").splitlines()[-5].startswith(r'| "two" \| two | zwei \| zwei | a')
        assert r'translate("\"two\" | two")' in card.text

    def test_nothing_of_a_local_path_gets_out(self, original: Path, trained: Path, plain: Path) -> None:
        assert "secret-place" in (trained / "arguments.json").read_text()
        local = {"dataset_name": f"{original.parent}/corpus", "train_file": None, "validation_file": None}
        for changes in ({}, local):
            arguments = read(trained / "arguments.json")
            arguments["data"] |= changes
            arguments["model"] |= {"model_name_or_path": str(original), "tokenizer_name": f"{original}/"}
            change(trained / "arguments.json", **arguments)
            card = build_model_card(trained)
            assert "secret-place" not in card.content
            assert "from `numbers`" in card.text
            assert "base_model" not in data_of(card).to_dict()
            assert "datasets" not in data_of(card).to_dict()
        assert str(plain.parent) not in build_model_card(plain).content

    def test_a_given_base_model_is_one_of_the_hub(
        self, plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "out" / "base").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        for path in ("/home/me/secret/model", "../model", "~/model", "C:\\model", "a/b/c", "", "out/base"):
            reason = ", which is a path here" if path == "out/base" else ""
            with pytest.raises(ValueError, match=re.escape(f"on the Hub, 'me/my-model' say, not {path!r}{reason}.")):
                write_model_card(plain, base_model=path)
        assert not (plain / "README.md").exists()

    @pytest.mark.parametrize("name", ["some/model", "/home/me/secret/model"])
    def test_the_trainer_names_no_path_as_base_model(self, plain: Path, name: str) -> None:
        arguments = Seq2SeqTrainingArguments(output_dir=str(plain), use_cpu=True, report_to="none")
        TranslationTrainer(model=make_model(), args=arguments).create_model_card(finetuned_from=name)
        card = ModelCard.load(plain / "README.md")
        assert data_of(card).base_model == (name if name == "some/model" else None)
        assert "secret" not in card.content

    def test_a_converted_model_names_the_original(self, plain: Path) -> None:
        record = {"system": "marian", "name": "some/model", "revision": "main"}
        (plain / "conversion.json").write_text(json.dumps(record))
        card = build_model_card(plain)
        assert data_of(card).base_model == "some/model"
        assert "by `vanilla_transformer` from `some/model` (`marian`). How that was trained is not" in card.text
        # What is named as a folder here is none of the Hub's.
        (plain / "conversion.json").write_text(json.dumps({**record, "name": "model", "revision": None}))
        card = build_model_card(plain)
        assert "base_model" not in data_of(card).to_dict()
        assert "from `model` (`marian`)" in card.text

    def test_names_of_the_hub_become_metadata(self, trained: Path) -> None:
        arguments = read(trained / "arguments.json")
        arguments["data"] |= {"train_file": None, "dataset_name": "some/corpus", "dataset_config_name": "de-en"}
        arguments["model"] |= {"model_name_or_path": "some/model"}
        change(trained / "arguments.json", **arguments)
        scores = read(trained / "test" / "metrics.json")["arguments"]
        scores |= {"test_file": None, "dataset_name": "some/corpus", "dataset_config_name": "de-en"}
        change(trained / "test" / "metrics.json", arguments=scores)
        card = build_model_card(trained, datasets=["more/pairs", "some/corpus"])
        assert data_of(card).datasets == ["some/corpus", "more/pairs"]
        assert data_of(card).base_model == "some/model"
        assert rows_of(card)["training"] == "`some/corpus`, configuration `de-en`, split `train`"
        (result,) = {result.unique_identifier: result for result in data_of(card).eval_results if result.dataset_split}
        assert result == ("translation", "some/corpus", "de-en", "test", None)
        # The same names of folders, as the training saw and recorded them.
        change(trained / "arguments.json", local=["some/model", "some/corpus"])
        card = build_model_card(trained)
        assert "base_model" not in data_of(card).to_dict()
        assert "datasets" not in data_of(card).to_dict()
        assert {result.dataset_type for result in data_of(card).eval_results} == {"local"}
        assert "from `model`" in card.text
        assert rows_of(card)["training"].startswith("`corpus`")

    def test_a_folder_of_a_model_alone_says_what_is_unknown(self, plain: Path) -> None:
        card = build_model_card(plain)
        assert "its languages are not recorded" in card.text
        assert "How it was trained is not recorded." in card.text
        assert part(card, "Training data").startswith("Not recorded")
        assert part(card, "Training").startswith("Not recorded")
        assert part(card, "Evaluation").endswith("No scores on a test set are recorded.")
        assert part(card, "License") == "No license was given."
        assert "It has no tokenizer" in card.text
        assert rows_of(card)["attention heads"] == "4 + 2"
        count = make_model().num_parameters()
        assert rows_of(card)["parameters"] == f"{count:,}, float32"
        assert set(data_of(card).to_dict()) == {"library_name", "pipeline_tag", "tags"}
        assert "## License" not in build_model_card(plain, license="mit").text

    def test_models_of_the_library_need_no_code(self, tmp_path: Path) -> None:
        make_marian().save_pretrained(tmp_path)
        card = build_model_card(tmp_path, repo_id="alice/marian")
        assert 'AutoModelForSeq2SeqLM.from_pretrained("alice/marian")' in card.text
        assert "trust_remote_code" not in card.text
        assert "An encoder-decoder of the type `marian`" in card.text
        assert "vanilla_transformer" not in data_of(card).tags

    def test_the_files_that_a_person_reads_are_named_if_they_are_there(self, plain: Path) -> None:
        names = [f"`{name}_vanilla_transformer.py`" for name in ("configuration", "modeling", "attention", "positions")]
        assert f"To understand the model, read {', '.join(names)}." in build_model_card(plain).text
        (plain / "modeling_vanilla_transformer.py").unlink()
        text = build_model_card(plain).text
        assert "trust_remote_code" not in text
        assert "To understand the model" not in text

    @pytest.mark.parametrize(
        ("langs", "codes"), [(["eng_Latn", "deu_Latn"], ["eng", "deu"]), (["pt-BR", "x"], ["pt"]), (["a", "b"], None)]
    )
    def test_only_iso_codes_become_languages(self, plain: Path, langs: list[str], codes: list[str] | None) -> None:
        change(plain / "config.json", langs=langs)
        assert data_of(build_model_card(plain)).language == codes
        assert data_of(build_model_card(plain, language="sw")).language == "sw"

    def test_an_unfinished_record_is_no_error(self, trained: Path) -> None:
        for name in ("metrics.json", "trainer_state.json", "eval_results.json", "train_results.json"):
            (trained / name).write_text("{}")
        rows = rows_of(build_model_card(trained))
        assert {rows[name] for name in ("updates", "weights", "time", "hardware", "software")} == {"not recorded"}
        assert rows["seed"] == "3"

    @pytest.mark.parametrize("content", [b'{"a": ', b"[1]", b"\xff\xfe"])
    def test_a_damaged_file_is_named(self, trained: Path, content: bytes) -> None:
        names = "config generation_config arguments metrics trainer_state eval_results averaged/averaging test/metrics"
        for path in [trained / f"{name}.json" for name in names.split()]:
            before = path.read_bytes() if path.exists() else b"{}"
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path} is damaged: it must hold a JSON object"):
                build_model_card(trained)
            path.write_bytes(before)

    def test_weights_that_cannot_be_counted_are_not(self, plain: Path) -> None:
        weights = (plain / "model.safetensors").read_bytes()
        (plain / "model.safetensors").write_bytes(weights[:-1])
        assert rows_of(build_model_card(plain))["parameters"] == "not recorded"
        (plain / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
            build_model_card(plain)

    @pytest.mark.parametrize(
        ("before", "last", "expected"),
        [
            (False, None, "after each sub-layer (post-LN)"),
            (False, True, "after each sub-layer (post-LN), and once more after a stack"),
            (True, True, "before each sub-layer (pre-LN)"),
            (True, False, "before each sub-layer (pre-LN), and none after a stack"),
        ],
    )
    def test_an_unusual_place_of_the_last_norm_is_told(
        self, plain: Path, before: bool, last: bool | None, expected: str
    ) -> None:
        change(plain / "config.json", normalize_before=before, add_final_layer_norm=last)
        assert rows_of(build_model_card(plain))["layer normalization"] == expected


class TestValidation:
    def test_the_hub_takes_the_cards(self, trained: Path, plain: Path) -> None:
        cards = [build_model_card(trained, license="apache-2.0"), build_model_card(plain)]
        with LocalHub(tokens={"hf_alice": "alice"}) as hub, hub.client("hf_alice"):
            for card in cards:
                card.validate()
            with pytest.raises(ValueError, match="language"):
                ModelCard("---\nlanguage: xx-nonsense-\n---\n").validate()


class TestPackage:
    def test_the_template_is_also_at_the_top(self) -> None:
        assert (ROOT / "model_card.md").resolve() == ROOT / "vanilla_transformer" / "hub" / "model_card.md"

    @pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the distributions")
    def test_a_wheel_made_of_the_sdist_has_every_file(self, run_python: RunPython, tmp_path: Path) -> None:
        sources = tmp_path / "sources"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "vanilla_transformer", sources / "vanilla_transformer", ignore=ignore)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, sources)
        build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
        run_python("-c", build, "build_sdist", tmp_path, cwd=sources)
        (archive,) = tmp_path.glob("*.tar.gz")
        with tarfile.open(archive) as sdist:
            sdist.extractall(tmp_path / "unpacked", filter="data")
        (unpacked,) = (tmp_path / "unpacked").iterdir()
        run_python("-c", build, "build_wheel", tmp_path, cwd=unpacked)
        (path,) = tmp_path.glob("*.whl")
        files = [path for path in (sources / "vanilla_transformer").rglob("*") if path.is_file()]
        expected = {path.relative_to(sources).as_posix(): path.read_bytes() for path in files}
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vanilla_transformer/")]
            assert {name: wheel.read(name) for name in names} == expected
        assert "vanilla_transformer/hub/model_card.md" in expected
