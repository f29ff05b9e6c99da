"""benchmark_browser.py with a tiny model: all sides translate alike, and the file holds the figures."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from chromium import open_chromium
from letters import TOKENIZER, make_letters_model, train_on_letters
from node_packages import find_node_modules

from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.web import export_web

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
for package in ("ctranslate2", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)
benchmark: Any = importlib.import_module("benchmark_browser")


def test_every_side_translates_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages = find_node_modules("@huggingface/transformers")
    with open_chromium(tmp_path / "profile"):  # or the test is skipped
        pass
    model = make_letters_model()
    train_on_letters(model, tmp_path / "training", reverse=True)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages)
    (tmp_path / "test.txt").write_text("abc\n\nhgfe\nd\n", encoding="utf-8")
    options = {"model_name_or_path": "model", "page": "page", "test_file": "test.txt", "output_file": "found.json"}
    numbers = {"lines": 5, "sentences": 2, "sentence_words": 1, "num_beams": 2, "rounds": 1}
    benchmark.main([f"--{name}={tmp_path / value}" for name, value in options.items()]
                   + [f"--{name}={value}" for name, value in numbers.items()])  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert list(found) == ["browser", "python", "ctranslate2"]
    for figures in found.values():
        assert figures["translations"] == ["cba", "efgh", "d", "cba", "efgh"]
        assert figures["words_per_second"] == pytest.approx(5 / figures["seconds"][0])
        assert figures["words_of_a_sentence"] == 1
        assert 0 < figures["milliseconds_of_a_sentence"] <= figures["slowest_sentence"]
    assert capsys.readouterr().out.count("words/s") == 3


def test_a_folder_that_is_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--page .* is no folder that export --format web made"):
        benchmark.BenchmarkArguments(model_name_or_path="model", page=str(tmp_path))
