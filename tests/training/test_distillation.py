"""Word-level distillation: the loss against the publication's formula written as loops, and what a teacher must be."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from library_models import make_marian
from many_processes import write_pairs
from test_trainer import TOKENIZER, make_model, make_rows, make_trainer
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer.commands import train as script
from vanilla_transformer.training.arguments import TranslationTrainingArguments


def naive_loss(logits: Any, wanted: Any, labels: Any, smoothing: float, weight: float) -> float:
    """(1 - weight) * NLL + weight * KL(teacher || student), means over tokens; (B, T, V), (B, T, V) and (B, T)."""
    student, teacher = (each.double().softmax(dim=-1).tolist() for each in (logits, wanted))
    total, count = 0.0, 0
    for row, targets in enumerate(labels.tolist()):
        for place, label in enumerate(targets):
            if label == -100:
                continue
            count += 1
            p, q = student[row][place], teacher[row][place]
            smooth = -sum(map(math.log, p)) / len(p)
            total += (1 - weight) * ((1 - smoothing) * -math.log(p[label]) + smoothing * smooth)
            total += weight * sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    return total / count


@pytest.mark.parametrize(("smoothing", "weight"), [(0.0, 0.5), (0.1, 0.3), (0.1, 1.0)])
def test_it_is_the_publications_formula(tmp_path: Path, smoothing: float, weight: float) -> None:
    rows = make_rows(5)
    torch.manual_seed(3)
    teacher = make_model(dropout=0.5, d_model=16).train()
    model: Any = make_model(dropout=0.3, label_smoothing=smoothing)
    trainer = make_trainer(tmp_path, rows, model=model, teacher_weight=weight)
    trainer.teacher = teacher.eval()
    batch = trainer.data_collator(rows)
    with torch.no_grad():
        wanted = teacher(**batch).logits
    model.train()
    for count in (None, batch["labels"].ne(-100).sum()):
        loss, outputs = trainer.compute_loss(model, dict(batch), True, count)
        expected = naive_loss(outputs.logits.detach(), wanted, batch["labels"], smoothing, weight)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    with torch.no_grad():
        in_evaluation, own = trainer.compute_loss(model.eval(), dict(batch)), model(**batch).loss
    assert float(in_evaluation) == pytest.approx(float(own), rel=1e-6)


def test_a_teacher_begins_targets_with_its_own_symbol(tmp_path: Path) -> None:
    rows = make_rows(5)
    torch.manual_seed(3)
    teacher, student = make_model(decoder_start_token_id=2), make_model()
    assert student.config.decoder_start_token_id != 2
    trainer = make_trainer(tmp_path, rows, model=student, teacher_weight=1.0)
    trainer.teacher = teacher.eval()
    batch = trainer.data_collator(rows)
    own = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": batch["labels"]}
    with torch.no_grad():
        wanted = teacher(**own).logits
        loss, outputs = trainer.compute_loss(student.train(), dict(batch), True)
    assert float(loss) == pytest.approx(naive_loss(outputs.logits, wanted, batch["labels"], 0.0, 1.0), rel=1e-5)


def test_a_student_of_nothing_but_the_teacher_comes_near_it(tmp_path: Path) -> None:
    rows = Dataset.from_list(make_rows(8, longest=6))
    torch.manual_seed(5)
    teacher, student = make_model(dropout=0.0), make_model(dropout=0.0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    trainer = make_trainer(tmp_path, rows, model=student, teacher_weight=1.0, max_steps=60, learning_rate=0.01)
    trainer.teacher = teacher.eval()
    batch = trainer.data_collator(list(rows))
    student.train()
    before = float(trainer.compute_loss(student, dict(batch)).detach())
    trainer.train()
    student.train()
    assert float(trainer.compute_loss(student, dict(batch)).detach()) < before / 2


def test_a_training_with_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "tiny", "--train_file", *write_pairs(tmp_path, "train", 12), "--vocab_size", "280"]
    words += ["--max_steps", "2", "--use_cpu", "--learning_rate", "0.001", "--warmup_steps", "1", "--report_to", "none"]
    script.main([*words, "--output_dir", str(tmp_path / "teacher")])
    taught = ["--teacher_model", str(tmp_path / "teacher"), "--teacher_weight", "0.9"]
    script.main([*words, *taught, "--tokenizer_name", str(tmp_path / "teacher"), "--output_dir", str(tmp_path / "one")])
    assert (tmp_path / "one" / "model.safetensors").is_file()
    words[words.index("280")] = "270"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        script.main([*words, *taught, "--output_dir", str(tmp_path / "other")])
    assert "has another vocabulary: train with tokenizer_name=" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").glob("*.json"))


def test_a_teacher_reads_what_it_wants_before_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--train_file", *write_pairs(tmp_path, "train", 12)]
    words = ["--preset", "tiny", *files, "--vocab_size", "280", "--report_to", "none"]
    words += ["--max_steps", "1", "--use_cpu", "--learning_rate", "0.001", "--warmup_steps", "1"]
    script.main([*words, "--lang_pairs", "en-de", "--both_directions", "true", "--output_dir", str(tmp_path / "many")])
    taught = [*words, "--tokenizer_name", str(tmp_path / "many"), "--teacher_model", str(tmp_path / "many")]
    for more, message in (
        (
            ["--source_lang", "en", "--target_lang", "de"],
            "wants '<2de> ' before each source of en to de, and",
        ),
        ([], ": name source_lang and target_lang"),
    ):
        with pytest.raises(SystemExit):
            script.main([*taught, *more, "--output_dir", str(tmp_path / "one")])
        assert message in capsys.readouterr().err
    script.main([*taught, "--lang_pairs", "en-de", "--output_dir", str(tmp_path / "one")])
    assert (tmp_path / "one" / "model.safetensors").is_file()


@pytest.mark.parametrize("passes", [1, 4])
def test_a_model_of_the_library_has_the_same_share_however_many_passes(tmp_path: Path, passes: int) -> None:
    rows = [{**row, "labels": (row["labels"] * 9)[:9]} for row in make_rows(8)]  # a mean of means is the mean
    torch.manual_seed(3)
    student, teacher = make_marian(), make_marian()
    for model in (student, teacher):
        model.resize_token_embeddings(len(TOKENIZER))
    for module in student.modules():
        vars(module).update({name: 0.0 for name in vars(module) if name.endswith("dropout")})
    with torch.no_grad():
        teacher.model.shared.weight.add_(torch.randn_like(teacher.model.shared.weight))
    sizes = {"per_device_train_batch_size": 8 // passes, "gradient_accumulation_steps": passes}
    options: Any = {**sizes, "max_source_tokens": None, "teacher_weight": 0.3, "max_steps": 1}
    trainer = make_trainer(tmp_path, Dataset.from_list(rows), model=student, **options)
    trainer.teacher = teacher.eval()
    batch = trainer.data_collator(rows)
    with torch.no_grad():
        logits, wanted = (model.eval()(**batch).logits for model in (student, teacher))
    trainer.train()
    logged = trainer.state.log_history[0]["loss"]
    assert logged == pytest.approx(naive_loss(logits, wanted, batch["labels"], 0.0, 0.3), rel=1e-3)


@pytest.mark.skipif(
    "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters,
    reason="this version of transformers smooths labels by passes",
)
def test_smoothed_losses_of_the_library_s_models_are_means_over_all_targets(tmp_path: Path) -> None:
    rows = [{**row, "labels": (row["labels"] * 9)[:length]} for row, length in zip(make_rows(2), (9, 2), strict=True)]
    torch.manual_seed(3)
    model = make_marian()
    model.resize_token_embeddings(len(TOKENIZER))
    for module in model.modules():
        vars(module).update({name: 0.0 for name in vars(module) if name.endswith("dropout")})
    options: Any = {"max_source_tokens": None, "max_steps": 1, "per_device_train_batch_size": 1}
    options |= {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.2}
    trainer = make_trainer(tmp_path, Dataset.from_list(rows), model=model, **options)
    batch = trainer.data_collator(rows)
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    trainer.train()
    expected = naive_loss(logits, logits, batch["labels"], 0.2, 0.0)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_weight": 0.0}, "teacher_weight=0.0: must be above 0"),
        ({"teacher_model": "x", "r_drop": 1.0}, "not both"),
    ],
)
def test_wrong_wishes(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationTrainingArguments(output_dir=str(tmp_path), **options)
