"""scripts/benchmarks/benchmark_corpora.py: that it runs, and what its table says of a speed."""

from pathlib import Path

import benchmark_corpora as benchmark
import pytest
from tiny_translations import random_sentences, save_model


def test_the_costs_of_a_speed() -> None:
    arguments = benchmark.BenchmarkArguments("model", "file", cores=1000, price_per_core_hour=0.5)
    speeds = {benchmark.Setting(1, 1): 10.0, benchmark.Setting(2, 2): 80.0}
    rows = benchmark.make_table(arguments, speeds).splitlines()
    # 10^9 sentences at 10 a second are 10^8 core-seconds.
    assert rows[2] == "| 1 x 1 | 10.0 | 10.0 | 27,778 | 1.16 | 13,889 |"
    assert rows[3] == "| 2 x 2 | 80.0 | 20.0 | 13,889 | 0.58 | 6,944 |"
    assert "not measured" in rows[-1]


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in ["", *random_sentences(9)]))
    words = [f"--model_name_or_path={save_model(tmp_path / 'model')}", f"--test_file={tmp_path / 'in.txt'}"]
    benchmark.main([*words, "--num_sentences=20", "--num_processes=1", "--repeats=1"])
    said = capsys.readouterr().out
    assert "| 1 x 1 |" in said
    assert "joining in one process" in said
