"""Cards of the halves: which half it is, what it is for and how to use it, and nothing that its folder does not say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hub_folders import TEXTS, save_single_stack
from model_cards import change, data_of, part, rows_of, summary_of
from remote_process import run_as_at_a_prompt
from tiny_single_stacks import DECODERS, SINGLE_STACKS
from tiny_vanilla import make_model
from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.hub.card import build_model_card, write_model_card

CLASSIFIER = "VanillaTransformerForSequenceClassification"
LANGUAGE_MODEL = "VanillaTransformerForCausalLM"
# What each is for: the Hub's task, and words of the summary.
PURPOSES = {
    "VanillaTransformerEncoderModel": ("feature-extraction", "makes a state of each token of a text."),
    "VanillaTransformerForSequenceClassification": ("text-classification", "with a head that classifies texts."),
    "VanillaTransformerForTokenClassification": ("token-classification", "head that classifies the tokens of a text."),
    "VanillaTransformerForQuestionAnswering": ("question-answering", "where the answer to a question starts and ends."),
    "VanillaTransformerDecoderModel": ("feature-extraction", "makes a state of each token of a text from those up to"),
    "VanillaTransformerForCausalLM": ("text-generation", "as a language model."),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("halves")
    for name in SINGLE_STACKS:
        save_single_stack(root / name, name, langs=["en", "de"])
    return root


@pytest.fixture
def classifier(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / CLASSIFIER, tmp_path / "classifier")


@pytest.fixture
def language_model(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / LANGUAGE_MODEL, tmp_path / "writer")


@pytest.mark.parametrize("name", SINGLE_STACKS)
class TestEachSingleStack:
    def test_it_is_called_what_it_is(self, saved: Path, name: str) -> None:
        card = build_model_card(saved / name, repo_id="alice/half")
        side, (task, purpose) = "decoder" if name in DECODERS else "encoder", PURPOSES[name]
        data = data_of(card).to_dict()
        assert data["pipeline_tag"] == task
        assert data["tags"] == [task, "vanilla_transformer", "attention-is-all-you-need"]
        assert data["language"] == ["de" if side == "decoder" else "en"]
        assert not {"base_model", "base_model_relation", "metrics", "model-index"} & data.keys()
        summary = summary_of(card)
        assert f"The {side} of [Attention Is All You Need]" in summary
        assert purpose in summary
        assert ("without attention over a source" in summary) == (side == "decoder")
        assert "How it was trained is not recorded." in summary
        falsehoods = ("translat", "encoder-decoder", "encoder + decoder", "Seq2Seq", "source and target", "arguments.")
        assert not [words for words in falsehoods if words in card.content]
        assert part(card, "Training data") == "Not recorded."
        assert part(card, "Evaluation").endswith("No scores are recorded.")

    def test_its_sizes_are_those_of_one_stack(self, saved: Path, name: str) -> None:
        rows, is_decoder = rows_of(build_model_card(saved / name)), name in DECODERS
        model = SINGLE_STACKS[name].from_pretrained(saved / name)
        assert type(model).__name__ == name
        assert rows["parameters"] == f"{model.num_parameters():,}, float32"
        found = [rows[row] for row in ("layers", "attention heads", "inner width of feed-forward layers (d_ff)")]
        assert found == (["2", "2", "20"] if is_decoder else ["1", "4", "24"])
        assert rows["vocabulary"] == f"{model.config.vocab_size} tokens"
        assert ("embedding tables" in rows) == (name == LANGUAGE_MODEL)
        assert ("labels" in rows) == (name in (CLASSIFIER, "VanillaTransformerForTokenClassification"))

    def test_its_examples_run_as_they_stand(self, saved: Path, name: str) -> None:
        use = part(build_model_card(saved / name, repo_id=str(saved / name)), "Use")
        here, there = re.findall(r"```python\n(.*?)```", use, re.DOTALL)
        # test_push.py runs the second one, in a process without the package.
        alone = here.replace("import vanilla_transformer\n", "")
        assert there == alone.replace(f'{name}"', f'{name}", trust_remote_code=True')
        found = run_as_at_a_prompt(here, {})
        kinds = {
            "feature-extraction": lambda: len(found[0][0]) == 16,
            "question-answering": lambda: found in "A man rides a horse.",
            "text-classification": lambda: found[0]["label"] in ("LABEL_0", "LABEL_1"),
            "text-generation": lambda: found[0]["generated_text"].startswith("A text to start from."),
            "token-classification": lambda: {item["entity"] for item in found} <= {"LABEL_0", "LABEL_1"},
        }
        assert kinds[PURPOSES[name][0]]()
        (auto_class,) = re.findall(r"`(AutoModel\w*)` and `AutoTokenizer` load it in the same two ways", use)
        assert type(getattr(transformers, auto_class).from_pretrained(saved / name)).__name__ == name


MANY_LABELS = {"id2label": {str(n): f"l{n}" for n in range(77)}}
SEVERAL_LABELS = {"id2label": {"0": "a|b", "1": "c"}, "problem_type": "multi_label_classification"}


class TestLabels:
    @pytest.mark.parametrize(
        ("settings", "row"),
        [
            ({}, "2: `LABEL_0`, `LABEL_1`; what they mean is not recorded"),
            ({"id2label": {"1": "good", "0": "bad"}}, "2: `bad`, `good`"),
            ({"id2label": {str(n): f"l{n}" for n in range(11)}}, f"11: {', '.join(f'`l{n}`' for n in range(11))}"),
            (MANY_LABELS, f"77: {', '.join(f'`l{n}`' for n in range(20))} and 57 more"),
            (SEVERAL_LABELS, r"2: `a\|b`, `c`; a text may have several"),
        ],
    )
    def test_they_are_those_of_the_configuration(self, classifier: Path, settings: dict[str, Any], row: str) -> None:
        change(classifier / "config.json", **settings)
        assert rows_of(build_model_card(classifier))["labels"] == row

    @pytest.mark.parametrize("kind", [None, "regression"])
    def test_one_label_of_tokens_is_a_label(self, saved: Path, tmp_path: Path, kind: str | None) -> None:
        folder = shutil.copytree(saved / "VanillaTransformerForTokenClassification", tmp_path / "single")
        change(folder / "config.json", id2label={"0": "name"}, problem_type=kind)
        assert rows_of(build_model_card(folder))["labels"] == "1: `name`"

    @pytest.mark.parametrize(("kind", "count"), [(None, 1), ("regression", 1), ("regression", 3)])
    def test_numbers_have_none(self, tmp_path: Path, kind: str | None, count: int) -> None:
        names = {number: f"LABEL_{number}" for number in range(count)}
        folder = save_single_stack(tmp_path / "single", CLASSIFIER, id2label=names, problem_type=kind)
        card = build_model_card(folder, repo_id=str(folder))
        rows = rows_of(card)
        assert rows["numbers for each text (regression)"] == str(count)
        assert "labels" not in rows
        for word in ("label", "classifies", "score that comes"):
            assert word not in card.text
        assert "with a head that rates texts in numbers." in summary_of(card)
        # The example gives the numbers themselves, which the library's pipeline squeezes between 0 and 1 by default.
        example, _ = re.findall(r"```python\n(.*?)```", part(card, "Use"), re.DOTALL)
        found = run_as_at_a_prompt(example, {})
        model, tokenizer = SINGLE_STACKS[CLASSIFIER].from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            (numbers,) = model(**tokenizer("A text to rate.", return_tensors="pt")).logits
        torch.testing.assert_close(torch.tensor(sorted(item["score"] for item in found)), numbers.sort().values)

    def test_those_of_a_configuration_have_numbers_as_keys(self, classifier: Path) -> None:
        change(classifier / "config.json", id2label={number: f"l{number}" for number in range(11)})
        config = VanillaTransformerConfig.from_pretrained(classifier).to_dict()
        assert set(config["id2label"]) == set(range(11))
        assert build_model_card(classifier, config=config).content == build_model_card(classifier).content


class TestTexts:
    """Of a language model: what they begin and end with."""

    @pytest.mark.parametrize("begins", [True, False])
    @pytest.mark.parametrize("ends", [True, False])
    def test_they_are_those_of_the_tokenizer(self, language_model: Path, begins: bool, ends: bool) -> None:
        tokenizer = AutoTokenizer.from_pretrained(language_model, add_bos_token=begins, add_eos_token=ends)
        tokenizer.save_pretrained(language_model)
        use = part(build_model_card(language_model, repo_id=str(language_model)), "Use")
        assert ("Texts begin with `<s>`, which the tokenizer adds." in use) == begins
        assert ("The tokenizer puts nothing before a prompt." in use) != begins
        assert "Texts end with `</s>`, at which `generate` stops." in use
        assert ("adds `</s>` too; a prompt must not end so" in use) == ends
        namespace: dict[str, Any] = {}
        run_as_at_a_prompt(re.findall(r"```python\n(.*?)```", use, re.DOTALL)[0], namespace)
        ids = namespace["write"].tokenizer(TEXTS[0])["input_ids"]
        assert (ids[0] == 0) == begins
        assert ids[-1] != 2, "the example goes on with the prompt"

    def test_generate_stops_where_its_settings_say(self, language_model: Path) -> None:
        change(language_model / "generation_config.json", eos_token_id=[2, 3], do_sample=True)
        use = part(build_model_card(language_model), "Use")
        told = (
            "Texts end with `</s>` or `<unk>`, at which `generate` stops.\nUnless told otherwise, `generate` samples."
        )
        assert told in use

    def test_nothing_is_said_without_a_tokenizer(self, language_model: Path) -> None:
        for path in language_model.glob("token*.json"):
            path.unlink()
        use = part(build_model_card(language_model), "Use")
        assert "It has no tokenizer" in use
        assert "exts begin" not in use


def make_trainer(folder: Path) -> Trainer:
    """The library's, for three updates of the classifier in a folder, evaluated in the course of them."""
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder)
    examples: Any = [{**tokenizer(text), "labels": index % 2} for index, text in enumerate(TEXTS * 2)]
    settings: dict[str, Any] = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return Trainer(
        model=SINGLE_STACKS[CLASSIFIER].from_pretrained(folder),
        args=TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=examples,
        eval_dataset=examples,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda predicted: {"macro_f1": float(np.mean(predicted.label_ids))},
    )


class TestRecords:
    def test_what_the_librarys_trainer_recorded_is_told(self, classifier: Path, tmp_path: Path) -> None:
        trainer = make_trainer(classifier)
        trained = trainer.train()
        trainer.save_model()
        trainer.save_state()
        card = build_model_card(classifier)
        rows = rows_of(card)
        assert "It was trained with a `Trainer` of `transformers`." in card.text
        assert rows["updates"] == "3 (1.5 epochs)"
        assert rows["texts at a time in each process"] == "3"
        assert rows["time"] == "not recorded"
        *_, last = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
        told = f"loss {last['eval_loss']:.4g}, macro f1 {last['eval_macro_f1']:.4g}"
        assert part(card, "Evaluation").endswith(f"\n- while it was trained, after update {last['step']}: {told}")

        trainer.save_metrics("train", trained.metrics)
        scores = trainer.evaluate()
        trainer.save_metrics("eval", {**scores, "eval_samples": 6})
        trainer.save_metrics("predict", {"predict_loss": 0.5})
        card = build_model_card(classifier)
        lines = part(card, "Evaluation").splitlines()
        told = f"loss {scores['eval_loss']:.4g}, macro f1 {scores['eval_macro_f1']:.4g} (6 texts)"
        assert lines[-2:] == [f"- `eval_results.json`: {told}", "- `predict_results.json`: loss 0.5"]
        assert re.fullmatch(r"\d+ s", rows_of(card)["time"])
        assert str(tmp_path) not in card.content
        assert "model-index" not in data_of(card).to_dict(), "the texts that were scored are not known"

    def test_the_records_of_the_whole_are_not_the_halfs(self, classifier: Path) -> None:
        def write(path: str, **content: Any) -> None:
            (classifier / path).write_text(json.dumps(content))

        write("trainer_state.json", global_step=4321, log_history=[{"eval_loss": 1.25, "step": 4321}])
        write("eval_results.json", eval_bleu=43.21)
        assert "4,321" in build_model_card(classifier).content
        (classifier / "test").mkdir()
        write("test/metrics.json", bleu=43.21, arguments={"model_name_or_path": "m", "output_dir": "m/test"})
        write("metrics.json", steps=4321, parameters=4321)
        write("conversion.json", system="marian", name="some/model", revision="main")
        (classifier / "curves.png").touch()
        for name in ("arguments.json", "conversion.json"):
            write("arguments.json", data={"train_file": ["4321.en"]}, model={"model_name_or_path": "some/model"})
            (classifier / name).unlink()  # either of them alone tells whose the records are
            card = build_model_card(classifier)
            for word in ("4321", "4,321", "43.21", "curves", "some/model"):
                assert word not in card.content

    def test_what_it_was_made_from_is_told_if_it_is_known(self, classifier: Path) -> None:
        card = build_model_card(classifier, base_model="some/translator", datasets="some/texts")
        data = data_of(card).to_dict()
        assert (data["base_model"], data["base_model_relation"]) == ("some/translator", "finetune")
        assert "It was trained further, from `some/translator`." in card.text
        assert part(card, "Training data") == "`some/texts`."
        write_model_card(classifier, base_model="some/translator")
        write_model_card(classifier)
        assert "base_model_relation: finetune" in (classifier / "README.md").read_text()

    @pytest.mark.parametrize("name", ["tokenizer.json", "trainer_state.json", "eval_results.json"])
    def test_a_damaged_file_is_named(self, language_model: Path, name: str) -> None:
        (language_model / name).write_text('{"a": ')
        with pytest.raises(ValueError, match=re.escape(str(language_model / name))):
            build_model_card(language_model)


def test_a_card_follows_the_model(classifier: Path, tmp_path: Path) -> None:
    """In the folder of a translation model the encoder is saved later: the card speaks of that then."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    path = write_model_card(folder, license="mit")
    assert "pipeline_tag: translation" in path.read_text()
    path.write_text(path.read_text() + "\nMine.\n")
    SINGLE_STACKS[CLASSIFIER].from_pretrained(classifier).save_pretrained(folder)
    write_model_card(folder)
    text = path.read_text()
    for words in ("pipeline_tag: text-classification", 'pipeline("text-classification"', "Mine.", "license: mit"):
        assert text.count(words) >= 1
    assert "translat" not in text
