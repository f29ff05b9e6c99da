"""The trainer: batches by tokens from datasets and streams, resumed exactly, counted and scored by token."""

import json
import logging
import math
import os
import re
import resource
import shutil
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from datasets import Dataset, IterableDataset
from library_models import make_marian
from safetensors.torch import load_file, save_file
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, TrainerCallback, set_seed

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.data.padding import PaddedColumns
from vanilla_transformer.data.stream_batches import StreamingTokenBatches
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.training.arguments import DataArguments, TranslationTrainingArguments
from vanilla_transformer.training.callbacks import StopEarly
from vanilla_transformer.training.checkpoints import CheckpointError
from vanilla_transformer.training.records import explain_choice
from vanilla_transformer.training.setup import build_trainer, settle_training_arguments
from vanilla_transformer.training.trainer import TranslationTrainer

TOKENIZER = VanillaTransformerTokenizer()
BUDGET = 60


def make_rows(count: int = 60, *, seed: int = 0, longest: int = 15) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(seed)

    def sentence() -> list[int]:
        return [*generator.integers(4, 200, size=generator.integers(1, longest)).tolist(), 2]

    return [{"input_ids": source, "labels": sentence()} for source in (sentence() for _ in range(count))]


def make_model(**changes: Any) -> VanillaTransformerForConditionalGeneration:
    set_seed(1)
    config = VanillaTransformerConfig.from_preset("tiny", **{"vocab_size": len(TOKENIZER), **changes})
    return VanillaTransformerForConditionalGeneration(config)


def make_stream(rows: list[dict[str, list[int]]], **changes: Any) -> StreamingTokenBatches:
    dataset = Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    settings = {"max_source_tokens": BUDGET, "max_target_tokens": BUDGET, "window": 20, "seed": 3}
    return StreamingTokenBatches(dataset, **{**settings, **changes})


EACH_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def make_trainer(output_dir: Path, data: Any = 9, **changes: Any) -> TranslationTrainer:
    """`data` are a dataset, a stream, or so many rows; `changes` are arguments of the training or the trainer."""
    settings: dict[str, Any] = {"output_dir": str(output_dir), "disable_tqdm": True, "use_cpu": True, "report_to": []}
    settings |= {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "max_source_tokens": BUDGET}
    settings |= {"learning_rate": 1e-2, "warmup_steps": 1}
    names = ("eval_dataset", "callbacks", "model", "compute_loss_func")
    trainer_settings = {name: changes.pop(name) for name in names if name in changes}
    model = trainer_settings.pop("model", None) or make_model()
    train_dataset = Dataset.from_list(make_rows(data)) if isinstance(data, int) else data
    return TranslationTrainer(
        model=model,
        args=TranslationTrainingArguments(**{**settings, **changes}),
        train_dataset=train_dataset,
        processing_class=TOKENIZER,
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model=model),
        **trainer_settings,
    )


def pairs_of(batches: Any) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    return Counter(
        (tuple(ids[mask.bool()].tolist()), tuple(labels[labels != -100].tolist()))
        for batch in batches
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    )


def same_weights(one: Any, other: Any) -> bool:
    others = other.state_dict()
    return all(torch.equal(tensor, others[name]) for name, tensor in one.state_dict().items())


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_keep_both_budgets_and_hold_every_pair_once(tmp_path: Path, workers: int) -> None:
    rows = make_rows()
    trainer = make_trainer(tmp_path, len(rows), max_target_tokens=45, dataloader_num_workers=workers)
    loader = trainer.get_train_dataloader()
    assert isinstance(loader.dataset, PaddedColumns)
    batches = list(loader)
    assert all(batch["input_ids"].numel() <= BUDGET and batch["labels"].numel() <= 45 for batch in batches)
    assert pairs_of(batches) == Counter((tuple(row["input_ids"]), tuple(row["labels"])) for row in rows)
    assert len(batches) == len(trainer.get_train_dataloader()) < len(rows) / 2


def test_without_budgets_it_is_the_librarys_trainer(tmp_path: Path) -> None:
    quiet = partial(tiny_trainer.make_trainer, tmp_path, eval_strategy="no", save_strategy="no")
    trainers = [quiet(trainer_class=kind) for kind in (Seq2SeqTrainer, TranslationTrainer)]
    for trainer in trainers:
        set_seed(1)
        trainer.train()
    histories = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in trainers]
    assert len(histories[0]) == 6
    assert histories[0] == histories[1]
    assert same_weights(*(each.model for each in trainers))


def test_dropping_the_last_batch_drops_no_pair_to_validate_on(tmp_path: Path) -> None:
    data = Dataset.from_list(make_rows(7))
    settings = {"max_source_tokens": None, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, data, eval_dataset=data, dataloader_drop_last=True, **settings)
    loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(data)
    assert [sum(pairs_of(loader).values()) for loader in loaders] == [4, 7, 7]


def test_a_dataset_that_has_no_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_source_tokens=60 needs .* not a IterableDataset"):
        make_trainer(tmp_path, IterableDataset.from_generator(make_rows), max_steps=1).train()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_a_run_goes_on_where_its_checkpoint_left_it(tmp_path: Path, kind: str, accumulation: int) -> None:

    def trainer(folder: str, **changes: Any) -> TranslationTrainer:
        data: Any = 90 if kind == "dataset" else make_stream(make_rows(90))
        settings = {**EACH_STEP, "max_steps": 6, "save_steps": 2, **changes}
        return make_trainer(tmp_path / folder, data, gradient_accumulation_steps=accumulation, **settings)

    whole = trainer("whole")
    whole.train()
    trainer("broken", callbacks=[StopAfter(5)]).train()
    resumed = trainer("broken")
    resumed.train(resume_from_checkpoint=True)
    assert not resumed.args.ignore_data_skip, "as it was"
    assert same_weights(whole.model, resumed.model)
    losses = [
        [(entry["step"], entry["loss"], entry["epoch"]) for entry in run.state.log_history if "loss" in entry]
        for run in (whole, resumed)
    ]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_a_run_goes_on_within_a_later_epoch_and_at_its_end(tmp_path: Path) -> None:
    def trainer(folder: str, **changes: Any) -> TranslationTrainer:
        return make_trainer(tmp_path / folder, 12, num_train_epochs=3, **EACH_STEP, **changes)

    whole = trainer("whole")
    whole.train()
    epoch = whole.state.global_step // 3
    for step in (epoch + epoch // 2, 2 * epoch):
        trainer("broken", callbacks=[StopAfter(step)]).train()
        resumed = trainer("broken")
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 3 * epoch
        assert same_weights(whole.model, resumed.model)
        shutil.rmtree(tmp_path / "broken")


def test_a_run_that_goes_on_logs_and_saves_as_often_as_it_is_asked_now(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2, save_total_limit=9, **EACH_STEP).train()
    changes = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "save_total_limit": 9}
    trainer = make_trainer(tmp_path, **changes)
    trainer.train(resume_from_checkpoint=True)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3, 6, 8)}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 4, 6, 8]


def test_a_run_that_skips_no_data_may_have_epochs_of_another_length(tmp_path: Path) -> None:
    make_trainer(tmp_path, num_train_epochs=1, **EACH_STEP).train()
    changes = {"num_train_epochs": 3, "max_source_tokens": 2 * BUDGET, **EACH_STEP}
    trainer = make_trainer(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="cannot be counted as epochs"):
        trainer.train(resume_from_checkpoint=True)
    trainer = make_trainer(tmp_path, **changes, ignore_data_skip=True)
    assert trainer.train(resume_from_checkpoint=True).global_step > 3


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_lengths_that_are_given_count_instead_of_the_datasets(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 20)
    trainer.train_lengths = (np.full(20, 30), np.full(20, 20))
    assert {len(batch["labels"]) for batch in trainer.get_train_dataloader()} == {2}
    trainer.train_lengths = (np.full(10, 3), np.full(10, 3))
    with pytest.raises(ValueError, match="train_lengths has 10 pairs, the training data have 20"):
        trainer.get_train_dataloader()


def test_the_callers_arguments_stay_as_they_are(tmp_path: Path) -> None:
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, warmup_steps=100, report_to=[])
    for d_model in (32, 64):
        trainer = TranslationTrainer(model=make_model(d_model=d_model), args=arguments, eval_dataset=[])
        assert trainer.args.learning_rate == pytest.approx((d_model * 100) ** -0.5)
    assert arguments.learning_rate is None


class TestStream:
    def test_it_trains_for_the_steps_asked_for(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, make_stream(make_rows(20)), max_steps=15, max_source_tokens=None)
        assert trainer.train().global_step == 15
        assert trainer.state.epoch == 1, "a stream has no length: 1 stands for all of its steps"

    def test_it_may_be_evaluated_before_it_is_trained(self, tmp_path: Path) -> None:
        data = Dataset.from_list(make_rows(5))
        trainer = make_trainer(tmp_path, make_stream(make_rows(20)), max_steps=1, eval_dataset=data)
        assert trainer.evaluate()["eval_loss"] > 0

    def test_a_checkpoint_without_a_position_is_refused(self, tmp_path: Path) -> None:
        settings = {**EACH_STEP, "max_steps": 4, "save_steps": 2}
        make_trainer(tmp_path, make_stream(make_rows()), **settings).train()
        position = tmp_path / "checkpoint-2" / "data_state_0.json"
        assert json.loads(position.read_text())["skip"] >= 0
        position.unlink()
        trainer = make_trainer(tmp_path, make_stream(make_rows()), **settings)
        with pytest.raises(ValueError, match=r"data_state_0\.json is missing"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    def test_workers_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="dataloader_num_workers=1: must be 0 for a stream"):
            make_trainer(tmp_path, make_stream(make_rows()), max_steps=1, dataloader_num_workers=1)


class TestCounts:
    def test_tokens_and_padding_are_counted(self, tmp_path: Path) -> None:
        rows = make_rows()
        batches = list(make_trainer(tmp_path, len(rows)).get_train_dataloader())
        trainer = make_trainer(tmp_path, len(rows), num_train_epochs=1, logging_steps=len(batches))
        metrics = trainer.train().metrics
        source, target = (sum(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
        assert metrics["train_source_tokens"] == source
        assert metrics["train_target_tokens"] == target
        assert metrics["train_samples_per_second"] == pytest.approx(len(rows) / metrics["train_runtime"], rel=0.01)
        logged = trainer.state.log_history[0]
        cells = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
        assert logged["padding_share"] == pytest.approx(1 - (source + target) / cells, abs=1e-4)
        ratio = logged["source_tokens_per_second"] / logged["target_tokens_per_second"]
        assert ratio == pytest.approx(source / target, rel=0.01)

    def test_an_evaluation_before_the_first_update_takes_nothing_from_its_time(self, tmp_path: Path) -> None:
        data = Dataset.from_list(make_rows(9))
        settings = {"max_steps": 1, "eval_strategy": "steps", "eval_on_start": True, "load_best_model_at_end": False}
        trainer = make_trainer(tmp_path, data, eval_dataset=data, **settings)

        def wait(_: Any) -> dict[str, float]:
            time.sleep(0.5)
            return {}

        trainer.compute_metrics = wait
        trainer.train()
        speeds = [entry["target_tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(speeds) == 1
        assert speeds[0] > 0

    @pytest.mark.parametrize("batch_size", [1, 7])
    @pytest.mark.parametrize("generate", [False, True])
    @pytest.mark.parametrize("kind", ["own", "Marian"])
    def test_the_evaluation_loss_is_a_mean_over_tokens(
        self, tmp_path: Path, batch_size: int, generate: bool, kind: str
    ) -> None:
        """And without smoothing, which is the library's for models that have none of their own."""
        rows = make_rows(23)
        model: Any = make_model() if kind == "own" else make_marian(vocab_size=len(TOKENIZER))
        settings: dict[str, Any] = {"per_device_eval_batch_size": batch_size, "predict_with_generate": generate}
        settings |= {"label_smoothing_factor": 0.0 if kind == "own" else 0.3}
        settings |= {"generation_max_length": 5, "load_best_model_at_end": False}
        trainer = make_trainer(tmp_path, model=model, eval_dataset=Dataset.from_list(rows), **settings)
        metrics = trainer.evaluate()
        total, tokens = 0.0, 0
        with torch.no_grad():
            for row in rows:
                labels = torch.tensor([row["labels"]])
                logits = model.eval()(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
                total -= logits.log_softmax(dim=-1).gather(-1, labels[..., None]).sum().item()
                tokens += labels.numel()
        assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
        assert trainer.state.log_history[-1]["eval_perplexity"] == metrics["eval_perplexity"]


@pytest.mark.parametrize("option", [{"bpe_dropout": 0.5}, {"unigram_alpha": 0.1}])
def test_texts_are_cut_anew_in_each_epoch(option: dict[str, Any], tmp_path: Path) -> None:
    texts = [f"{'ab' * (number % 5 + 1)} cd" for number in range(400)]
    corpora = {"train": Dataset.from_dict({"source": texts, "target": texts[::-1]})}
    kind: Any = "bpe" if "bpe_dropout" in option else "unigram"
    tokenizer = train_tokenizer(texts, model_type=kind, vocab_size=290, show_progress=False)
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_source_tokens=100)
    model = make_model(vocab_size=len(tokenizer))
    settle_training_arguments(arguments, model.config, validates=False, regularizes_subwords=True)
    data_arguments = DataArguments(train_file=["in memory"], max_target_length=40, **option)
    trainer = build_trainer(model, tokenizer, corpora, data_arguments, arguments)
    epochs = [pairs_of(trainer.get_train_dataloader()) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        spelt = Counter(
            tuple(tokenizer.decode(list(side), skip_special_tokens=True) for side in pair) for pair in epoch.elements()
        )
        assert spelt == Counter(zip(texts, texts[::-1], strict=True))
    plain = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    drawn = sum(len(source) for source, _ in epochs[0].elements())
    assert drawn > 1.1 * plain
    assert trainer.train_lengths is not None
    # The next start plans the same batches, although the tokens are drawn anew.
    again = build_trainer(model, tokenizer, corpora, data_arguments, arguments)
    assert again.train_lengths is not None
    assert [list(lengths) for lengths in again.train_lengths] == [list(lengths) for lengths in trainer.train_lengths]
    assert 0.85 * drawn < sum(trainer.train_lengths[0]) < 1.5 * drawn  # lengths are rounded


class TestWarningsAfterLoading:
    @pytest.fixture
    def warnings(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        return caplog

    def train_to_4(self, folder: Path) -> TranslationTrainer:
        rows = Dataset.from_list(make_rows(24))
        settings = {**EACH_STEP, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
        settings |= {"load_best_model_at_end": True, "predict_with_generate": False, "eval_dataset": rows}
        return make_trainer(folder, rows, **settings)

    def test_shared_tables_are_not_called_missing(self, warnings: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        self.train_to_4(tmp_path).train()
        self.train_to_4(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert "keys" not in warnings.text

    @pytest.mark.parametrize("name", ["model.encoder.layers.0.fc1.weight", "model.shared.weight"])
    def test_weights_that_are_missing_are(self, name: str, warnings: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        self.train_to_4(tmp_path).train()
        path = tmp_path / "checkpoint-2" / "model.safetensors"
        weights = load_file(path)
        del weights[name]
        save_file({**weights, "stranger": torch.zeros(1)}, path)
        self.train_to_4(tmp_path).train(resume_from_checkpoint=str(path.parent))
        (missing,) = [message for message in warnings.messages if "missing keys" in message]
        shared = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
        assert set(re.findall(r"'([\w.]+)'", missing)) == {name, *(shared if name == "model.shared.weight" else [])}
        assert any("unexpected keys" in message and "stranger" in message for message in warnings.messages)


@pytest.mark.parametrize("limit", [1, 2])
def test_steps_decide_which_checkpoints_go_and_not_the_folders_times(tmp_path: Path, limit: int) -> None:

    class Reverse(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for folder in tmp_path.glob("checkpoint-*"):
                os.utime(folder, (2e9, 2e9 - 100 * int(folder.name.partition("-")[2])))

    make_trainer(tmp_path, callbacks=[Reverse()], max_steps=5, save_total_limit=limit, **EACH_STEP).train()
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-4", "checkpoint-5"][-limit:]


def test_others_may_read_the_weights_as_far_as_the_umask_allows(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        trainer = make_trainer(tmp_path, max_steps=2, average_checkpoints=2, **EACH_STEP)
        trainer.train()
        trainer.save_model()
    finally:
        os.umask(old)
    weights = [*tmp_path.rglob("*.safetensors")]
    assert len(weights) == 4
    assert {path.stat().st_mode & 0o777 for path in weights} == {0o640}


class TestDivergence:
    @pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
    def test_it_ends_the_training_before_anything_is_saved(self, tmp_path: Path, max_grad_norm: float) -> None:
        trainer = make_trainer(tmp_path, max_steps=6, learning_rate=1e30, max_grad_norm=max_grad_norm, **EACH_STEP)
        with pytest.raises(FloatingPointError, match=r"at update 3 the gradient norm is nan.* lower than 1e\+30"):
            trainer.train()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
        assert all("loss" not in entry or entry["loss"] for entry in trainer.state.log_history)

    def test_a_validation_loss_that_is_no_number_ends_it_too(self, tmp_path: Path) -> None:
        data = Dataset.from_list(make_rows(9))
        settings = {**EACH_STEP, "eval_strategy": "steps", "eval_steps": 1, "predict_with_generate": False}
        trainer = make_trainer(tmp_path, data, eval_dataset=data, learning_rate=1e30, max_steps=6, **settings)
        with pytest.raises(FloatingPointError, match="at update 2 the validation loss is nan"):
            trainer.train()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("kind", ["own", "Marian"])
def test_the_longest_generation_may_be_shorter_than_the_models_own(kind: str, tmp_path: Path) -> None:
    """`generation_max_length` counts the start token, and counts more than a `max_new_tokens` of the model."""
    data = Dataset.from_list(make_rows(3))
    model: Any = make_model() if kind == "own" else make_marian(vocab_size=len(TOKENIZER))
    model.generation_config.update(max_new_tokens=12, min_new_tokens=4)
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 5}
    trainer = make_trainer(tmp_path, model=model, load_best_model_at_end=False, **settings)

    def measure(predicted: EvalPrediction) -> dict[str, float]:
        written = (predicted.predictions != TOKENIZER.pad_token_id).any(axis=0)
        return {"length": 1 + max(written.nonzero()[0])}

    trainer.compute_metrics = measure
    assert trainer.evaluate(data)["eval_length"] == 5
    assert (trainer.predict(data).metrics or {})["test_length"] == 5
    assert trainer.evaluate(data, max_new_tokens=7, min_new_tokens=7)["eval_length"] == 8


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_evaluating_changes_no_training(tmp_path: Path, budget: int | None, generate: bool) -> None:
    data = Dataset.from_list(make_rows(30))
    settings = {"num_train_epochs": 2, "max_source_tokens": budget, "per_device_train_batch_size": 7}
    settings |= {"predict_with_generate": generate, "generation_max_length": 4, "load_best_model_at_end": False}
    trainers = []
    for steps in (None, 2):
        own = {"eval_strategy": "no"} if steps is None else {"eval_strategy": "steps", "eval_steps": steps}
        trainers.append(make_trainer(tmp_path, data, eval_dataset=data.take(9), **settings, **own))
        trainers[-1].train()
    assert same_weights(trainers[0].model, trainers[1].model)


class TestBestCheckpoint:
    def train(self, folder: Path, scores: list[float], **changes: Any) -> TranslationTrainer:
        """Evaluates after each update, with these scores called BLEU; chrF is 10 less each time."""
        data, remaining = Dataset.from_list(make_rows(9)), iter(scores)
        settings = {**EACH_STEP, "eval_strategy": "steps", "eval_steps": 1}
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "bleu", "generation_max_length": 3}
        trainer = make_trainer(folder, data, eval_dataset=data, **{**settings, **changes})
        trainer.compute_metrics = lambda _: {"bleu": next(remaining), "chrf": 10.0 * trainer.state.global_step}
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        return trainer

    def test_of_equal_scores_the_lower_loss_decides(self, tmp_path: Path) -> None:
        trainer = self.train(tmp_path, [0.0] * 4, max_steps=4)
        losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        best = trainer.state.best_global_step
        assert best == min(losses, key=losses.__getitem__) > 1
        said = explain_choice(trainer)
        assert said.startswith(f"It is that of update {best}, the best by bleu of those saved")
        assert f"loss {min(losses.values()):.4g}" in said

    def test_a_run_that_goes_on_compares_by_the_measure_that_is_given_now(self, tmp_path: Path) -> None:
        self.train(tmp_path, [99.0, 0, 0, 0], max_steps=4)
        trainer = self.train(tmp_path, [0.0], max_steps=5, metric_for_best_model="chrf")
        assert (trainer.state.best_global_step, trainer.state.best_metric) == (5, 50)

    @pytest.mark.parametrize("name", ["perplexity", "eval_perplexity", "loss"])
    def test_a_lower_perplexity_is_better(self, tmp_path: Path, name: str) -> None:
        trainer = self.train(tmp_path, [1.0] * 4, max_steps=4, metric_for_best_model=name)
        values = [entry["eval_perplexity"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert trainer.state.best_global_step == 1 + values.index(min(values))

    def test_what_was_not_saved_is_not_the_best(self, tmp_path: Path) -> None:
        """Validated after each update, saved after each second one: the last are deleted, but not the best of them."""
        scores = [5.0, 6.0, 9.0, 4.0, 3.0, 2.0, 1.0, 0.0]
        trainer = self.train(tmp_path, scores, max_steps=8, save_steps=2, save_total_limit=2)
        assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, 6)
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}
        assert "It is that of update 2, the best by bleu" in explain_choice(trainer)


class TestEarlyEnds:
    @staticmethod
    def train(folder: Path, scores: list[float], **changes: Any) -> TranslationTrainer:
        """A training of at most 9 updates, each of which is validated, and each third saved; patience is 2."""
        settings: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 3,
        }
        settings |= {"metric_for_best_model": "bleu", "greater_is_better": True, "max_steps": 9, **changes}
        data, remaining = Dataset.from_list(make_rows(9)), iter(scores)
        trainer = make_trainer(folder, data, eval_dataset=data, callbacks=[StopEarly(2)], **settings)
        trainer.compute_metrics = lambda _: {"bleu": next(remaining)}
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        return trainer

    def test_the_last_weights_are_saved_and_averaged(self, tmp_path: Path) -> None:
        self.train(tmp_path, [5.0, 4.0, 3.0, 2.0], average_checkpoints=3)
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
        self.train(tmp_path / "sooner", [5.0, 4.0, 3.0], average_checkpoints=3, save_steps=5)
        assert [path.name for path in (tmp_path / "sooner").glob("checkpoint-*")] == ["checkpoint-3"]
        assert (tmp_path / "sooner" / "averaged" / "model.safetensors").is_file()

    @pytest.mark.parametrize("scores", [[1.0, 5.0, 4.0, 3.0], [*range(8), 6.5]], ids=["early", "at the end"])
    def test_a_run_that_saves_the_best_only_has_its_last_one_too(self, scores: list[float], tmp_path: Path) -> None:
        """By it, the same command sees that the training has ended."""
        settings = {"save_strategy": "best", "load_best_model_at_end": True}
        first = self.train(tmp_path, scores, **settings)
        best, last = first.state.best_global_step or 0, first.state.global_step
        assert 0 < best < last
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", f"checkpoint-{last}"}
        again = self.train(tmp_path, [], **settings)
        assert again.state.global_step == last
        assert same_weights(again.model, first.model)

    def test_a_checkpoint_that_is_validated_again_counts_once(self, tmp_path: Path) -> None:
        """`eval_on_start` also validates where a resumed run begins."""
        settings = {"eval_on_start": True, "save_steps": 1}
        self.train(tmp_path, [3.0, 5.0, 6.0], max_steps=2, **settings)
        resumed = self.train(tmp_path, [6.0, 5.0, 4.0], **settings)
        assert resumed.state.global_step == 4
        assert [entry["step"] for entry in resumed.state.log_history if "eval_bleu" in entry] == [0, 1, 2, 2, 3, 4]

    def test_a_run_that_has_ended_early_trains_no_more(self, tmp_path: Path) -> None:
        first = self.train(tmp_path, [1.0, 5.0, 4.0, 3.0])
        assert first.state.global_step == 4
        again = self.train(tmp_path, [])
        assert again.state.global_step == 4
        assert same_weights(again.model, first.model)
        longer = make_trainer(tmp_path, 9, max_steps=6, **EACH_STEP)  # without patience
        longer.train(resume_from_checkpoint=True)
        assert longer.state.global_step == 6


class FullDisk(TrainerCallback):
    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


# Less than model.safetensors has; less than optimizer.pt has, which torch writes.
@pytest.mark.parametrize("size", [50_000, 300_000])
def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_training_with_a_message(tmp_path: Path, size: int) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, callbacks=[FullDisk(2, size)], **EACH_STEP)
    message = r"checkpoint-2 could not be saved: .*If the disk is full, make room\. The same"
    try:
        with pytest.raises(OSError, match=message):
            trainer.train()
        with pytest.raises(OSError, match="The model could not be saved") if size == 50_000 else nullcontext():
            trainer.save_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "checkpoint-1" in {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*checkpoint-2"))
