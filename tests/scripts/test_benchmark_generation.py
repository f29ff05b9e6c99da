"""benchmarks/benchmark_generation.py at toy sizes: equal work on all sides, the same function where that is said."""

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vanilla import make_model

from vanilla_transformer.data.tokenizer_training import train_tokenizer

benchmark: Any = importlib.import_module("benchmark_generation")
models: Any = importlib.import_module("benchmark_models")
TINY = ["--size=tiny", "--rounds=1", "--source_length=8", "--new_tokens=5"]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_every_side_generates_as_many_tokens_and_ours_those_of_marian(num_beams: int) -> None:
    """So many tokens for every sentence, whether the end symbol is among them or not."""
    setting = benchmark.Setting("tiny", "float32", num_beams, 4, 8, 5, "cpu")
    lengths = setting.inputs()["attention_mask"].sum(dim=1)
    assert lengths.tolist() == [8, 7, 5, 4]
    # It is no requirement of the tests; where it is installed, these hold for it too.
    types = models.list_compute_types("cpu")
    assert bool(types) == (importlib.util.find_spec("ctranslate2") is not None)
    sides = (*benchmark.MODELS, *(name for name, kind in benchmark.CTRANSLATE2.items() if kind in types))
    made = benchmark.make_models(sides, setting)
    found = {side: benchmark.generate(model, setting) for side, model in made.items()}
    assert all(tokens.shape == (4, 6) for tokens in found.values())
    assert found["ours"].tolist() == found["MarianMT"].tolist()
    assert found["ours"].tolist() == found.get("CTranslate2 float32", found["ours"]).tolist()


def test_all_models_have_nearly_as_many_parameters() -> None:
    with torch.device("meta"):
        made = {side: make(models.SIZES["small"]) for side, make in models.MODELS.items()}
    counts = {
        side: sum(each.numel() for each in model.parameters() if each.requires_grad) for side, model in made.items()
    }
    for side, count in counts.items():
        positions = 2 * 1026 * 256 if side in ("BART", "FSMT") else 0  # FSMT's sinusoids are parameters
        assert count - positions == pytest.approx(counts["ours"], rel=0.01), side


def test_the_search_over_torch_nn_transformer_finds_the_best_of_all_sequences() -> None:
    """With as many beams as there are beginnings, nothing can be missed."""
    torch.manual_seed(1)
    size = models.Size(d_model=16, ffn_dim=16, layers=1, heads=2, vocab_size=6)
    model = models.TorchTransformer(size).eval()
    source = torch.tensor([[4, 5, 4, 3]])
    mask = torch.ones_like(source)
    targets = torch.tensor(list(itertools.product(range(6), repeat=2)))
    rows = torch.cat([torch.full((36, 1), models.START), targets], dim=1)
    with torch.no_grad():
        logits = model(source.expand(36, -1), mask.expand(36, -1), rows[:, :-1], rows[:, 1:]).logits
    scores = logits.log_softmax(dim=-1).gather(2, targets[:, :, None]).sum(dim=(1, 2))
    found = model.generate(source, mask, num_beams=6, max_new_tokens=2)
    assert found.tolist() == rows[scores.argmax()][None].tolist()


def test_speed_is_written_with_ratios_and_a_table(tmp_path: Path) -> None:
    output_file = tmp_path / "results.json"
    options = ["--batch_size", "1", "3", "--side", "ours", "T5", "--part=speed", f"--output_file={output_file}"]
    benchmark.main([*TINY, *options])
    rows = json.loads(output_file.read_text())["results"]["speed"]
    expected = itertools.product(("greedy", "beam 4"), (1, 3), ("ours", "MarianMT", "T5"))
    assert [(row["search"], row["batch_size"], row["side"]) for row in rows] == list(expected)
    for ours, marian, _ in (rows[start : start + 3] for start in range(0, len(rows), 3)):
        ratio = ours["tokens_per_second"] / marian["tokens_per_second"]
        assert ours["tokens_per_second_over_marian"] == pytest.approx(ratio)
        assert ours["tokens_per_second"] == pytest.approx(5 * ours["batch_size"] / ours["seconds"])
        assert ours["share_equal_to_marian"] == 1.0
    table = output_file.with_suffix(".md").read_text()
    assert "| tiny | float32 | beam 4 | 3 |" in table
    assert f"{rows[0]['tokens_per_second']:,.0f} ({rows[0]['tokens_per_second_over_marian']:.2f}x)" in table


def test_what_ctranslate2_cannot_compute_here_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "list_compute_types", lambda device: {"float32", "int8"})
    words = ["--size=tiny", "--side", "ours", *benchmark.CTRANSLATE2]
    (arguments,) = benchmark.make_parser().parse_args_into_dataclasses(words)
    assert arguments.side == ["ours", "MarianMT", "CTranslate2 float32", "CTranslate2 int8"]
    assert "cannot compute so on cpu: CTranslate2 bfloat16, CTranslate2 float16." in capsys.readouterr().out


def test_static_memory_is_for_our_side_alone() -> None:
    words = ["--size=tiny", "--num_beams=3", "--batch_size=2"]
    (arguments,) = benchmark.make_parser().parse_args_into_dataclasses(words)
    (setting,) = benchmark.make_settings(arguments)
    sides = benchmark.make_models(["ours", benchmark.STATIC, "MarianMT"], setting)
    caches = {side: model.generation_config.cache_implementation for side, model in sides.items()}
    assert caches == {"ours": None, benchmark.STATIC: "static", "MarianMT": None}
    ours, static, marian = (benchmark.generate(model, setting) for model in sides.values())
    assert ours.equal(static)
    assert ours.equal(marian)


def test_sentences_are_translated_alike_by_the_same_weights(tmp_path: Path) -> None:
    texts = ["a man rides a horse .", "two dogs run", "", "the sun is shining on the old house", "a dog"]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    model = make_model(vocab_size=len(tokenizer), encoder_attention_heads=2)
    # What a trained model of this package may ask for, and no other side knows.
    model.generation_config.update(length_penalty_type="gnmt", allow_custom_entries=True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    test_file = tmp_path / "test.txt"
    test_file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    output_file = tmp_path / "results.json"
    files = [f"--model_name_or_path={tmp_path}", f"--test_file={test_file}", f"--output_file={output_file}"]
    options = ["--part=sentences", "--max_new_tokens=9", "--sentences_batch_size=2", "--num_beams=4"]
    benchmark.main([*TINY, *files, *options])
    rows = {row["side"]: row for row in json.loads(output_file.read_text())["results"]["sentences"]}
    assert [*rows][:4] == [f"{side}, {way}" for side in ("ours", "MarianMT") for way in ("whole file", "file order")]
    for row in [*rows.values()][:4]:
        assert (row["sentences"], row["share_equal_to_marian"]) == (4, 1.0)
        ratio = row["sentences_per_second"] / rows["MarianMT, file order"]["sentences_per_second"]
        assert row["sentences_per_second_over_marian"] == pytest.approx(ratio)
