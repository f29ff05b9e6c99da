"""benchmarks/benchmark_training.py at toy sizes: each side does what its name says, and the file holds it."""

import importlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

benchmark: Any = importlib.import_module("benchmark_training")
TINY = ["--d_model=64", "--layers=1", "--vocab_size=300", "--dtype=float32", "--rounds=1"]


def test_throughput_counts_real_tokens_of_every_side(tmp_path: Path) -> None:
    files = []
    for name in ("source", "target"):
        path = tmp_path / name
        path.write_text("".join(f"{'ab ' * (1 + number % 9)}c\n" for number in range(60)), encoding="utf-8")
        files.append(str(path))
    output_file = tmp_path / "results.json"
    options = ["--part=throughput", "--max_tokens=80", "--steps=2", f"--output_file={output_file}"]
    benchmark.main([*TINY, *options, "--train_file", *files])
    report = json.loads(output_file.read_text())
    rows = {row["side"]: row for row in report["results"]["throughput"]}
    assert list(rows) == list(benchmark.BATCHES)
    assert rows["ours"]["padding_share"] < rows["marian"]["padding_share"]
    assert rows["ours"]["padding_share"] == rows["marian, token batches"]["padding_share"], "the same batches"
    for row in rows.values():
        ratio = rows["ours"]["tokens_per_second"] / row["tokens_per_second"]
        assert row["ours_over_this_tokens_per_second"] == pytest.approx(ratio)
    assert "transformers" in report["versions"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_model_is_trained_by_a_step(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Each side learns its batch; the losses are means over tokens, at first not far from log(300) = 5.7."""
    arguments = benchmark.BenchmarkArguments(d_model=128, layers=1, vocab_size=300, sentence_length=8, padding=0.2)
    losses: list[float] = []
    backward = torch.Tensor.backward

    def note_and_go_backward(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", note_and_go_backward)
    for side in benchmark.MODELS:
        torch.manual_seed(0)
        step = benchmark.make_step_of_a_model(benchmark.Workload(arguments, "", side, dtype, 64))(8)
        losses.clear()
        for _ in range(6):
            step()
        assert len(losses) == 6
        assert losses[-1] < losses[0] < 8, side


def test_the_loss_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary so large that building all logits shows in the memory of the process, which is forked here."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    arguments = benchmark.BenchmarkArguments(d_model=64, vocab_size=40_000, sentence_length=32, rounds=1)
    workload = (arguments, "output layer and loss")
    sides = ("ours", "ours, with logits")
    (ours, *_), (plain, *_) = benchmark.measure(
        [benchmark.Workload(*workload, side, "float32", 1024) for side in sides]
    )
    megabytes_of_logits = 1024 * 40_000 * 4 / 2**20
    # About 3 and 0.7 times as much, and in both what a forked process reads of the libraries anew.
    assert plain[2] - ours[2] > 1.5 * megabytes_of_logits
