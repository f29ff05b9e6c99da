"""What the benchmarks say to wrong arguments, before they measure anything."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("generation", ["--part=sentences"], "--model_name_or_path and --test_file must be given"),
        ("generation", ["--batch_size", "4", "0"], "--batch_size is [4, 0]; it must be at least 1"),
        ("training", ["--part=throughput"], "--train_file must be given"),
        ("training", ["--d_model=100"], "--d_model is 100; it must be a multiple of 64"),
        ("training", ["--target_tokens=3"], "--target_tokens is 3; it must be at least 32"),
        ("translation", ["--model_name_or_path=nowhere", "--device=tpu"], "--device is tpu; it must be cpu or cuda"),
        ("translation", ["--model_name_or_path=nowhere", "--test_file=nowhere.txt"], "nowhere.txt"),
        ("alignments", ["--pairs", "a", "b", "--corpus", "c"], "--pairs, and --corpus if given, must name two files"),
        ("alignments", ["--pairs", "absent", "b"], "No such file"),
    ],
)
def test_wrong_arguments_are_explained(name: str, words: list[str], message: str, main: Any, capsys: Any) -> None:
    script = main("check_alignments") if name == "alignments" else main(f"benchmark_{name}")
    with pytest.raises(SystemExit):
        script(*words, *(["--model_name_or_path=x"] if name == "alignments" else []))
    assert message in capsys.readouterr().err
