"""Single-stack models are checked before they are pushed: their parts, and that they do their own task.

test_push.py pulls them from a Hub into a process without the package; test_push_command.py pushes one with the script.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import TEXTS, Damage, configure, edit_weights, larger_tokenizer, remove, save_single_stack, weigh
from tiny_single_stacks import SINGLE_STACKS, make_single_stack
from tiny_vanilla import make_model
from transformers import AutoTokenizer

from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer
from vanilla_transformer.hub.checks import PROBES, check_model_folder, inspect_model_folder
from vanilla_transformer.hub.trial import QUESTION, make_user, use

LABELS = {0: "zero", 1: "one", 2: "two"}
CLASSIFIER = "VanillaTransformerForSequenceClassification"
TOKEN_CLASSIFIER = "VanillaTransformerForTokenClassification"
READER = "VanillaTransformerForQuestionAnswering"
LANGUAGE_MODEL = "VanillaTransformerForCausalLM"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("halves")
    for name in SINGLE_STACKS:
        save_single_stack(root / name, name, id2label=LABELS)
    return root


def copy(saved: Path, name: str, tmp_path: Path) -> Path:
    return shutil.copytree(saved / name, tmp_path / "single")


# --- what each of them makes of a text, from its scores alone ----------------------------------------------------


def expect_states(model: Any, tokenizer: Any, text: str) -> str:
    return f"{len(tokenizer(text)['input_ids'])} states of {model.config.d_model} numbers"


def expect_label(model: Any, tokenizer: Any, text: str) -> str:
    return LABELS[int(model(**tokenizer(text, return_tensors="pt")).logits[0].argmax())]


def expect_labels(model: Any, tokenizer: Any, text: str) -> str:
    logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return " ".join(LABELS[int(scores.argmax())] for scores in logits[:-1])  # not of </s>


def expect_answer(model: Any, tokenizer: Any, text: str) -> str:
    batch = tokenizer(QUESTION, text, return_tensors="pt")
    outputs = model(**batch)
    found: dict[str, float] = {}
    for start, end in itertools.product(range(batch["input_ids"].shape[1]), repeat=2):
        if batch.sequence_ids()[start] == batch.sequence_ids()[end] == 1 and start <= end:
            span = text[batch.token_to_chars(0, start).start : batch.token_to_chars(0, end).end]
            score = float(outputs.start_logits[0, start] + outputs.end_logits[0, end])
            found[span] = max(score, found.get(span, -math.inf))
    return max(found, key=lambda span: found[span])


def expect_text(model: Any, tokenizer: Any, text: str) -> str:
    prompt = ids = tokenizer(text)["input_ids"]
    for _ in range(8):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    whole, before = (tokenizer.decode(each, skip_special_tokens=True) for each in (ids, prompt))
    return str(whole[len(before) :])


EXPECTED: dict[str, Callable[[Any, Any, str], str]] = {
    "VanillaTransformerEncoderModel": expect_states,
    CLASSIFIER: expect_label,
    TOKEN_CLASSIFIER: expect_labels,
    READER: expect_answer,
    "VanillaTransformerDecoderModel": expect_states,
    LANGUAGE_MODEL: expect_text,
}


@pytest.mark.parametrize("name", SINGLE_STACKS)
def test_nothing_is_wrong_with_it_and_it_does_its_task(saved: Path, name: str) -> None:
    """Without a card nothing is tried in another process, which test_push.py does for all of them at once."""
    found = inspect_model_folder(saved / name, card=None)
    assert [problem.check for problem in found.problems] == ["card"], found.problems
    model, tokenizer = SINGLE_STACKS[name].from_pretrained(saved / name), AutoTokenizer.from_pretrained(saved / name)
    with torch.no_grad():
        assert found.outcomes == [EXPECTED[name](model, tokenizer, text) for text in PROBES]
    assert found.is_self_contained


def test_numbers_are_those_of_the_model(saved: Path) -> None:
    """By which outcomes in two processes are compared."""
    for name, task in ((CLASSIFIER, "text-classification"), ("VanillaTransformerEncoderModel", "feature-extraction")):
        model = SINGLE_STACKS[name].from_pretrained(saved / name)
        tokenizer = AutoTokenizer.from_pretrained(saved / name)
        ((_, numbers),) = use(task, make_user(task, model, tokenizer), TEXTS[:1])
        with torch.no_grad():
            outputs = model(**tokenizer(TEXTS[0], return_tensors="pt"))
        expected = outputs.logits.softmax(-1).max() if name == CLASSIFIER else outputs.last_hidden_state.flatten()
        torch.testing.assert_close(torch.tensor(numbers), expected.reshape(-1))


# --- what can be wrong -------------------------------------------------------------------------------------------


def bring_weights_of_the_whole(folder: Path) -> None:
    bias = make_model(vocab_size=275).state_dict()["model.decoder.layers.0.fc1.bias"]
    edit_weights(folder, lambda weights: weights.update({"decoder.layers.0.fc1.bias": bias}))


def end_prompts(folder: Path) -> None:
    AutoTokenizer.from_pretrained(folder, add_bos_token=True, add_eos_token=True).save_pretrained(folder)


def save_two_vocabularies(folder: Path) -> int:
    """The source's has so many tokens."""
    tokenizer = train_separate_tokenizer(TEXTS * 3, ["ein Mann", "zwei"] * 3, vocab_size=275, target_vocab_size=266)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


ENCODER, DECODER = "VanillaTransformerEncoderModel", "VanillaTransformerDecoderModel"
TWO_LABELS = configure(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})

GENERATION = "generation_config.json"

# Of which model, what is done to it, which check must name it, and by which words.
DAMAGES: dict[str, tuple[str, Damage, str, str]] = {
    "no head": (CLASSIFIER, weigh(lambda weights: weights.pop("score.bias")), "weights", "score.bias"),
    "the head of another task": (READER, configure(architectures=[TOKEN_CLASSIFIER]), "weights", "score.weight"),
    "another number of labels": (CLASSIFIER, TWO_LABELS, "weights", "score.weight"),
    "another number of layers": (LANGUAGE_MODEL, configure(decoder_layers=3), "weights", "the model has are missing"),
    "a weight of the encoder-decoder": (ENCODER, bring_weights_of_the_whole, "weights", "model: decoder.layers.0.fc1"),
    "a larger tokenizer": (
        DECODER,
        larger_tokenizer,
        "tokenizer",
        "280 source tokens, but config.json says vocab_size",
    ),
    "prompts that end": (LANGUAGE_MODEL, end_prompts, "tokenizer", "it ends prompts with </s>"),
    "the source's vocabulary": (LANGUAGE_MODEL, save_two_vocabularies, "tokenizer", "save tokenizer.target_tokenizer"),
    "no generation config": (LANGUAGE_MODEL, remove(GENERATION), "generation_config", GENERATION),
    "no names of code": (READER, configure(auto_map=None), "code", "auto_map.AutoModelForQuestionAnswering in config"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(saved: Path, tmp_path: Path, damage: str) -> None:
    name, do, check, words = DAMAGES[damage]
    folder = copy(saved, name, tmp_path)
    do(folder)
    problems = check_model_folder(folder)
    assert {problem.check for problem in problems} == {check}
    assert any(words in problem.message for problem in problems), problems


def test_an_encoder_reads_with_the_sources_vocabulary(saved: Path, tmp_path: Path) -> None:
    """Of a tokenizer that has the target's too."""
    folder = copy(saved, TOKEN_CLASSIFIER, tmp_path)
    size = save_two_vocabularies(folder)
    make_single_stack(TOKEN_CLASSIFIER, vocab_size=size, id2label=LABELS).save_pretrained(folder)
    found = inspect_model_folder(folder, card=None)
    assert [problem.check for problem in found.problems] == ["card"]
    assert found.outcomes


def test_a_probe_of_the_encoder_decoder_is_none_of_its_encoder(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, CLASSIFIER, tmp_path)
    (folder / "test").mkdir()
    (folder / "test" / "sources.txt").write_text("Ein Mann.\n")
    assert inspect_model_folder(folder, card=None).probes == PROBES
