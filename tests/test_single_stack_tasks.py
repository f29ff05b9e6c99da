"""One small task for each head, learned with the library's own Trainer and collators and used through its pipelines."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_single_stacks import SINGLE_STACKS, TRAINABLE, main_output, make_single_stack, run
from tiny_vanilla import assert_close, make_sentences
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

# Any, since the library types the names of its own tasks only.
make_pipeline: Any = pipeline
WORDS = ["red", "green", "blue", "pink", "gold", "grey", "apple", "pear", "kiwi", "plum", "fig", "lime"]


def make_trainer(
    model: Any, folder: Path, examples: Any, collator: Any, tokenizer: Any = None, **changes: Any
) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": 5e-3, "warmup_steps": 30, "logging_steps": 1000, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 100, "report_to": "none"}
    settings |= {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, **changes}
    arguments = TrainingArguments(output_dir=str(folder / "training"), **settings)
    datasets = {"train_dataset": examples, "eval_dataset": examples}
    return Trainer(model=model, args=arguments, **datasets, data_collator=collator, processing_class=tokenizer)


@pytest.fixture(scope="module")
def trained() -> VanillaTransformerTokenizer:
    """A tokenizer to which each word, and each bracket, is one token."""
    texts = [" ".join(WORDS[start:] + WORDS[:start]) for start in range(len(WORDS))] + ["( ( ) ) :"] * 5
    tokenizer = train_tokenizer(texts * 3, vocab_size=320, show_progress=False)
    assert len(tokenizer(" ".join(WORDS) + " ( ) :")["input_ids"]) == len(WORDS) + 3 + 1
    return tokenizer


@pytest.fixture
def tokenizer(trained: VanillaTransformerTokenizer) -> VanillaTransformerTokenizer:
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def seq2seq(trained: VanillaTransformerTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a translation model, from which each task takes the single-stack model that it needs."""
    folder = tmp_path_factory.mktemp("seq2seq") / "model"
    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset(
        "tiny", vocab_size=len(trained), d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    trained.save_pretrained(folder)
    return folder


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def split(draw: Callable[[random.Random], Any], most: int, tests: int = 200) -> tuple[list[Any], list[Any]]:
    """Draws different texts for training, and others for the test."""
    chooser = random.Random(0)
    drawn = list(dict.fromkeys(draw(chooser) for _ in range(most)))
    assert len(drawn) > 4 * tests
    return drawn[tests:], drawn[:tests]


def draw_words(chooser: random.Random) -> tuple[str, ...]:
    return tuple(chooser.choice(WORDS) for _ in range(chooser.randrange(4, 8)))


def test_text_classification(seq2seq: Path, tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    def has_kiwi(text: str) -> bool:
        return "kiwi" in text

    def draw(chooser: random.Random) -> str:
        return " ".join(draw_words(chooser))

    def encode(texts: list[str]) -> Any:
        return Dataset.from_dict({**tokenizer(texts), "labels": [int(has_kiwi(text)) for text in texts]}).to_list()

    training, tests = split(draw, 3000)
    model = AutoModelForSequenceClassification.from_pretrained(seq2seq, id2label={0: "none", 1: "kiwi"})
    trainer = make_trainer(model, tmp_path, encode(training), DataCollatorWithPadding(tokenizer), max_steps=70)
    trainer.train()
    predicted = trainer.predict(encode(tests))
    assert cast(Any, predicted.metrics)["test_loss"] < 0.4

    classify = make_pipeline("text-classification", model=save(model, tokenizer, tmp_path / "saved"))
    answers = classify(tests, batch_size=50)
    wanted = ["kiwi" if has_kiwi(text) else "none" for text in tests]
    assert 60 < wanted.count("kiwi") < 140
    assert sum(answer["label"] == label for answer, label in zip(answers, wanted, strict=True)) > 180
    one = classify(tests[0])[0]
    assert one["label"] == answers[0]["label"]
    assert one["score"] == pytest.approx(answers[0]["score"], abs=1e-5)


def test_token_classification(seq2seq: Path, tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    def encode(words: Sequence[str]) -> dict[str, Any]:
        encoding = tokenizer(list(words), is_split_into_words=True)
        labels = [-100 if index is None else int(words[index] in fruit) for index in encoding.word_ids()]
        return {**encoding, "labels": labels}

    fruit = WORDS[6:]
    training, tests = split(draw_words, 2000)
    model = AutoModelForTokenClassification.from_pretrained(seq2seq, id2label={0: "colour", 1: "fruit"})
    collator = DataCollatorForTokenClassification(tokenizer)
    make_trainer(model, tmp_path, [encode(words) for words in training], collator, max_steps=30).train()

    mark = make_pipeline("token-classification", model=save(model, tokenizer, tmp_path / "saved"))
    right = total = 0
    for words, found in zip(tests, mark([" ".join(words) for words in tests], batch_size=50), strict=True):
        marked = {item["start"] for item in found if item["entity"] == "fruit"}
        starts = [len(" ".join([*words[:index], ""])) for index in range(len(words))]
        right += sum((start in marked) == (word in fruit) for start, word in zip(starts, words, strict=True))
        total += len(words)
    assert right > 0.95 * total


def test_text_generation(seq2seq: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Say the last of three words again, and stop. Texts begin with `<s>`; `</s>` ends those for training alone."""

    def draw(chooser: random.Random) -> str:
        words = chooser.sample(WORDS, 3)
        return f"{' '.join(words)} : {words[2]}"

    training, tests = split(draw, 2500)
    tokenizer = AutoTokenizer.from_pretrained(seq2seq, add_bos_token=True, add_eos_token=False)
    model = AutoModelForCausalLM.from_pretrained(seq2seq)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    examples = Dataset.from_dict(dict(tokenizer([text + tokenizer.eos_token for text in training]))).to_list()
    assert [examples[0]["input_ids"][place] for place in (0, -1)] == [0, 2]
    trainer = make_trainer(model, tmp_path, examples, collator, tokenizer, max_steps=180)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    generate = make_pipeline("text-generation", model=str(tmp_path / "saved"))
    prompts = [text.partition(" :")[0] + " :" for text in tests]
    outputs = generate(prompts, batch_size=50, do_sample=False, max_new_tokens=8)
    assert sum(output["generated_text"] == text for [output], text in zip(outputs, tests, strict=True)) > 180
    [new] = generate(prompts[0], do_sample=False, max_new_tokens=8, return_full_text=False)
    assert prompts[0] + new["generated_text"] == outputs[0][0]["generated_text"]
    assert "eos_token_id" not in caplog.text
    # As its streamers do, tokenizers decode what is new; alone, a space that begins it is between two words.
    assert tokenizer.decode(tokenizer("red blue")["input_ids"], skip_special_tokens=True) == "red blue"
    assert tokenizer.decode(tokenizer("red blue")["input_ids"][2:], skip_special_tokens=True) == " blue"
    assert tokenizer.decode([1, 1, *tokenizer("red")["input_ids"]], skip_special_tokens=True) == "red"


def test_feature_extraction(seq2seq: Path, tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    encoder = AutoModelForTextEncoding.from_pretrained(seq2seq)
    extract = make_pipeline("feature-extraction", model=save(encoder, tokenizer, tmp_path / "saved"))
    with torch.no_grad():
        batch = tokenizer("red plum fig", return_tensors="pt")
        expected = AutoModelForSeq2SeqLM.from_pretrained(seq2seq).get_encoder()(**batch).last_hidden_state
    torch.testing.assert_close(torch.tensor(extract("red plum fig")), expected)


def uneven_examples(name: str) -> list[dict[str, Any]]:
    sentences = make_sentences([3, 7, 2, 5, 4, 9, 6, 2])
    if name.endswith("SequenceClassification"):
        return [{"input_ids": sentence, "labels": sentence[0] % 2} for sentence in sentences]
    if name.endswith("QuestionAnswering"):
        return [{"input_ids": tokens, "start_positions": 1, "end_positions": len(tokens) - 1} for tokens in sentences]
    if name.endswith("TokenClassification"):
        return [{"input_ids": tokens, "labels": [token % 2 for token in tokens]} for tokens in sentences]
    return [{"input_ids": sentence} for sentence in sentences]


def collator_for(name: str, tokenizer: Any) -> Any:
    if name.endswith("CausalLM"):
        return DataCollatorForLanguageModeling(tokenizer, mlm=False)
    is_by_token = name.endswith("TokenClassification")
    return DataCollatorForTokenClassification(tokenizer) if is_by_token else DataCollatorWithPadding(tokenizer)


@pytest.mark.parametrize("name", TRAINABLE)
def test_gradient_accumulation(name: str, tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    """Four batches of two texts give the weights that one batch of eight gives, though they differ in tokens."""
    weights, losses = [], []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = make_single_stack(name, vocab_size=len(tokenizer))
        before = copy.deepcopy(model.state_dict())
        changes: dict[str, Any] = {"per_device_train_batch_size": batch_size, "max_steps": 2, "warmup_steps": 0}
        changes |= {"gradient_accumulation_steps": accumulation, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
        changes |= {"max_grad_norm": 0.0, "optim": "sgd", "logging_steps": 1}
        trainer = make_trainer(model, tmp_path, uneven_examples(name), collator_for(name, tokenizer), **changes)
        trainer.train()
        weights.append({key: tensor.clone() for key, tensor in model.state_dict().items()})
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert any((tensor - before[key]).abs().max() > 1e-3 for key, tensor in weights[-1].items())
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-4)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("smoothed_by", ["nobody", "model", "trainer"])
def test_a_language_models_loss_in_the_trainer(
    smoothed_by: str, tokenizer: VanillaTransformerTokenizer, tmp_path: Path
) -> None:
    """It is a mean over the tokens that are predicted, whoever smooths the labels; evaluation tells the perplexity."""
    model = make_single_stack("VanillaTransformerForCausalLM", vocab_size=len(tokenizer))
    examples = uneven_examples("VanillaTransformerForCausalLM")
    losses, plain_losses = [], []
    for example in examples:
        ids = torch.tensor([example["input_ids"]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        plain = -scores.gather(1, ids[0, 1:, None])[:, 0]
        plain_losses += plain.tolist()
        losses += (plain if smoothed_by == "nobody" else 0.8 * plain - 0.2 * scores.mean(dim=-1)).tolist()
    assert len(losses) == sum(len(example["input_ids"]) - 1 for example in examples)
    model.config.label_smoothing = 0.2 if smoothed_by == "model" else 0.0
    changes: dict[str, Any] = {"max_steps": 1, "logging_steps": 1}
    changes["label_smoothing_factor"] = 0.2 if smoothed_by == "trainer" else 0.0
    trainer = make_trainer(model, tmp_path, examples, collator_for("CausalLM", tokenizer), **changes)
    if smoothed_by != "trainer":
        found = trainer.evaluate(cast(Any, examples))["eval_loss"]
        assert found == pytest.approx(sum(plain_losses) / len(plain_losses), rel=1e-4)
        assert math.isfinite(math.exp(found))
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3)


@pytest.mark.parametrize("name", TRAINABLE)
def test_adapters(name: str, tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    kinds = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS", "CausalLM": "CAUSAL_LM"}
    kind = kinds.get(name.removeprefix("VanillaTransformerFor"), "QUESTION_ANS")
    make_single_stack(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    model = get_peft_model(
        SINGLE_STACKS[name].from_pretrained(tmp_path / "base"),
        LoraConfig(task_type=kind, target_modules=["q_proj", "v_proj"]),
    )
    trainer = make_trainer(
        model, tmp_path, uneven_examples(name), collator_for(name, tokenizer), max_steps=3, warmup_steps=0
    )
    trainer.train()
    ids = torch.tensor(make_sentences([6, 6]))
    expected = main_output(run(model.eval(), input_ids=ids))
    base = SINGLE_STACKS[name].from_pretrained(tmp_path / "base")
    assert (main_output(run(base, input_ids=ids)) - expected).abs().max() > 1e-3
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(main_output(run(loaded, input_ids=ids)), expected)
    merged = loaded.merge_and_unload()
    assert type(merged).__name__ == name
    merged.save_pretrained(tmp_path / "merged")
    again = SINGLE_STACKS[name].from_pretrained(tmp_path / "merged")
    assert_close(main_output(run(again, input_ids=ids)), expected)


def test_the_script_for_translation_refuses_single_stacks(
    main: Callable[[str], Callable[..., None]],
    seq2seq: Path,
    tokenizer: VanillaTransformerTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save(AutoModelForCausalLM.from_pretrained(seq2seq), tokenizer, tmp_path / "saved")
    (tmp_path / "pairs.tsv").write_text("red\trot\n")
    words = ("--train_file", tmp_path / "pairs.tsv", "--output_dir", tmp_path / "run", "--use_cpu")
    with pytest.raises(SystemExit):
        main("train")("--model_name_or_path", folder, *words)
    assert re.search("error: .*VanillaTransformerForCausalLM", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
