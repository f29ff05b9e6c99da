"""benchmark_translation.py with a tiny model: all sides translate the same, and the file holds the figures."""

import importlib
import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_seq2seq
from tiny_vanilla import make_model

benchmark: Any = importlib.import_module("benchmark_translation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_seq2seq.make_tokenizer()
    model = make_model(vocab_size=len(tokenizer), scale=0.6, attention_bias=True, decoder_attention_heads=4)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "test.txt").write_text("w1 w2 w3\n\nw4\nw5 w6 w7 w8 w9 w10\n", encoding="utf-8")
    return path


def test_every_side_translates_every_line_alike(folder: Path, tmp_path: Path) -> None:
    options = {"test_file": str(folder / "test.txt"), "max_lines": 8, "max_new_tokens": 9, "batch_size": 3}
    arguments = benchmark.BenchmarkArguments(model_name_or_path=str(folder), **options)
    source = tmp_path / "source.txt"
    benchmark.write_lines(arguments, source)
    lines = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10"]
    assert source.read_text(encoding="utf-8").splitlines() == (lines * 3)[:8], "repeated, without the empty line"
    found = {}
    for name in benchmark.SIDES:
        benchmark.Side(name, arguments).translate(source, tmp_path / "target.txt")
        found[name] = (tmp_path / "target.txt").read_text(encoding="utf-8").splitlines()
        benchmark.Side(name, arguments).translate(source, tmp_path / "target.txt", 2)
        assert (tmp_path / "target.txt").read_text(encoding="utf-8").splitlines() == found[name][:2]
    reference = found[benchmark.REFERENCE]
    assert (len(reference), len(set(reference))) == (8, 3)
    assert all(translations == reference for translations in found.values())


def test_rows_compare_medians_with_the_reference() -> None:
    found = {
        "ours, whole file": [(2.0, 4.0, 7.0), (1.0, 1.0, 9.0), (9.0, 2.0, 8.0)],
        benchmark.REFERENCE: [(6.0, 3.0, 5.0)],
    }
    translations = {"ours, whole file": ["a", "b", "c", "d"], benchmark.REFERENCE: ["a", "b", "c", "x"]}
    ours, _ = benchmark.make_rows(found, translations)
    expected = {"seconds": 2.0, "sentences_per_second": 2.0, "speedup": 3.0, "processor_speedup": 1.5}
    expected |= {"peak_megabytes": 9.0, "same_as_reference": 0.75}
    assert {name: ours[name] for name in expected} == expected
    assert "| ours, whole file | 2.0 | 3.00 | 1.50 | 9 | 75.0% |" in benchmark.make_table([ours])


def test_the_report_has_a_side_that_is_measured_beside_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a thread here; that a side has a process of its own is tested with the benchmark of training."""

    def start_thread(serve: Any, *arguments: Any) -> Any:
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=serve, args=(*arguments, theirs), daemon=True)
        thread.start()
        return ours, thread

    monkeypatch.setattr(benchmark, "start_process", start_thread)
    output_file = tmp_path / "results.json"
    words = ["--model_name_or_path", str(folder), "--test_file", str(folder / "test.txt"), "--max_lines=5"]
    benchmark.main([*words, "--side", "ours, whole file", "--max_new_tokens=3", f"--output_file={output_file}"])
    report = json.loads(output_file.read_text())
    (row,) = report["results"]
    assert row["sentences_per_second"] == pytest.approx(5 / row["seconds"])
    assert "speedup" not in row, "there is nothing to compare it with"
    assert "torch" in report["versions"]
    assert "5 lines, 4 beams, float32 on cpu" in capsys.readouterr().out
