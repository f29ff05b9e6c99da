"""ONNX: what was exported, run by ONNX Runtime, computes and generates what the model does."""

import json
import logging
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RunPython
from letters import TOKENIZER
from tiny_vanilla import assert_close, logits_of, make_model, make_sentences, pad
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.export.graphs import copy_for_tracing
from vanilla_transformer.export.onnx import compare_onnx, export_onnx
from vanilla_transformer.export.onnx_model import OnnxModel, is_exported_to_onnx, load_for_onnx
from vanilla_transformer.inference.losses import score_loss
from vanilla_transformer.inference.translate import translate, translate_n_best
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
onnx_ir = pytest.importorskip("onnx_ir")

TESTS = Path(__file__).parents[1]
SOURCES = ["A man.", "Two big dogs run", "", "x"]
# All kinds of maps, heads, norms and biases. Other models are traced in test_graphs.py.
FLAGS = ("normalize_before", "normalize_embedding", "attention_bias", "lm_head_bias")
MODEL: dict[str, Any] = {"decoder_layers": 1, "vocab_size": len(TOKENIZER), "max_position_embeddings": 64}
MODEL |= {**dict.fromkeys(FLAGS, True), "d_k": 3, "d_v": 5}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "max_new_tokens": 9},
    "gnmt": {"num_beams": 4, "num_return_sequences": 2, "length_penalty_type": "gnmt", "length_penalty": 0.6},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 9},
    "without a cache": {"num_beams": 2, "use_cache": False, "max_new_tokens": 5},
}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, scripts_directory: Path) -> tuple[Any, Path]:
    """A model, and the folder that the script made of it."""
    # Only random logits that differ much are decided alike by two implementations.
    model: Any = make_model(scale=1.0, **MODEL)
    folder = tmp_path_factory.mktemp("onnx")
    # Saved in half precision: what is exported is in float32 nonetheless.
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    arguments = {"model_name_or_path": folder / "model", "format": "onnx", "output_dir": folder / "exported"}
    main = runpy.run_path(str(scripts_directory / "export_model.py"))["main"]
    main([f"--{argument}={value}" for argument, value in arguments.items()])
    original = AutoModelForSeq2SeqLM.from_pretrained(folder / "model", dtype=torch.float32)
    return original, folder / "exported"


@pytest.fixture
def both(export: tuple[Any, Path]) -> tuple[Any, Any]:
    model, folder = export
    return model, OnnxModel(folder)


def make_inputs(lengths: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    input_ids, attention_mask = pad(make_sentences(lengths), side=side)
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("lengths", "target_length"), [([1], 1), ([5, 3, 9], 7), ([23, 2], 23)])
def test_logits_are_those_of_the_model(both: Any, lengths: list[int], target_length: int, side: str) -> None:
    model, exported = both
    targets = torch.tensor(make_sentences([target_length] * len(lengths), seed=1))
    inputs = {**make_inputs(lengths, side), "decoder_input_ids": targets}
    assert_close(logits_of(exported, **inputs), logits_of(model, **inputs))


def test_a_target_may_come_in_parts(both: tuple[Any, Any]) -> None:
    model, exported = both
    sources, targets = make_inputs([5, 3, 9]), torch.tensor(make_sentences([11] * 3, seed=1))
    states = exported.get_encoder()(**sources)
    cache, parts = None, []
    for part in targets.split([1, 4, 1, 5], dim=1):
        mask = sources["attention_mask"]
        outputs = exported(encoder_outputs=states, attention_mask=mask, decoder_input_ids=part, past_key_values=cache)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    assert cache is not None
    assert cache.get_seq_length() == 11
    assert_close(torch.cat(parts, dim=1), logits_of(model, **sources, decoder_input_ids=targets))


@pytest.mark.parametrize("search", SEARCHES)
def test_generates_what_the_model_generates(both: tuple[Any, Any], search: str) -> None:
    model, exported = both
    inputs = make_inputs([5, 3, 9, 1])
    found = []
    for each in (model, exported):
        torch.manual_seed(0)
        found.append(each.generate(**inputs, **SEARCHES[search]))
    assert torch.equal(*found)


def test_sequences_are_longer_than_the_table_of_sinusoids(both: tuple[Any, Any]) -> None:
    model, exported = both
    length = 3 * model.config.max_position_embeddings
    inputs = {**make_inputs([length, 2]), "decoder_input_ids": torch.tensor(make_sentences([length] * 2))}
    assert_close(exported(**inputs).logits, logits_of(model, **inputs))


def make_session(graph: Any) -> Any:
    return onnxruntime.InferenceSession(onnx_ir.to_proto(graph).SerializeToString())


def test_nothing_is_read_beyond_the_table_of_learned_positions() -> None:
    model: Any = copy_for_tracing(make_model(position_embedding_type="learned", position_offset=1))
    model.model.encoder.layers = torch.nn.ModuleList()  # which know nothing of positions
    session = make_session(exporting._export_encoder(model, opset=18))

    def encode(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tensor(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])

    inputs = make_inputs([23, 2])
    expected = model.model.encoder(**inputs).last_hidden_state.detach()
    mask = inputs["attention_mask"].bool()
    assert_close(encode(inputs)[mask], expected[mask])
    longer = {name: torch.nn.functional.pad(values, (0, 3)) for name, values in inputs.items()}
    # Padding needs no positions.
    assert_close(encode(longer)[:, :23][mask], expected[mask])
    longer["attention_mask"][:, -3:] = 1
    with pytest.raises(Exception, match="indices element out of data bounds"):
        encode(longer)


def test_a_process_without_torch_translates(export: tuple[Any, Path], run_python: RunPython) -> None:
    model, folder = export
    output = run_python(TESTS / "support" / "onnx_alone.py", folder, input="".join(f"{source}\n" for source in SOURCES))
    sources = TOKENIZER(SOURCES, padding=True, return_tensors="pt")
    expected = model.generate(**sources, max_new_tokens=20)
    assert json.loads(output.stdout) == TOKENIZER.batch_decode(expected, skip_special_tokens=True)


def test_the_functions_for_all_models_take_it(export: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = export
    arguments = EngineArguments(model_name_or_path=str(folder), engine="onnx", num_beams=2)
    exported, tokenizer, settings = arguments.load()
    settings |= {"max_new_tokens": 8, "progress": False}
    expected = translate(model, TOKENIZER, SOURCES, **settings)
    assert translate(exported, tokenizer, SOURCES, **settings) == expected
    settings["num_return_sequences"] = 2
    found, wanted = (translate_n_best(each, tokenizer, SOURCES, **settings) for each in (exported, model))
    for one, other in zip(found, wanted, strict=True):
        assert [found.text for found in one] == [found.text for found in other]
        scores = [torch.tensor([found.score for found in each]) for each in (one, other)]
        torch.testing.assert_close(*scores)
    pairs = (TOKENIZER, SOURCES, SOURCES[::-1])
    loss, original = (score_loss(each, *pairs, progress=False)["loss"] for each in (exported, model))
    assert loss == pytest.approx(original, rel=1e-5)
    assert exported.num_parameters() == model.num_parameters()
    # By its state a resumed translation of a file knows the model.
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "more.onnx").write_bytes(b"other weights")
    other_model: Any = OnnxModel(tmp_path)
    assert not torch.equal(exported.digest, other_model.digest)


def test_sinusoids_are_right_at_any_position() -> None:
    kind = "sinusoidal_concatenated"

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model = make_model(position_embedding_type=kind, position_offset=2)
            self.positions: Any = copy_for_tracing(model).model.encoder.embed_positions

        def forward(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sinusoids": self.positions(indices, indices.shape[1])}

    graph = exporting.export_graph(Positions(), {"indices": (exporting.BATCH, exporting.SOURCE)}, opset=18)
    indices = np.arange(100_000).reshape(4, -1)
    (found,) = make_session(graph).run(None, {"indices": indices})
    expected = SINUSOIDS[kind](torch.tensor(indices + 2).double(), 16)
    assert_close(torch.tensor(found), expected.float(), tolerance=1e-6)


def test_files_are_what_other_runners_expect(export: tuple[Any, Path]) -> None:
    model, folder = export
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert is_exported_to_onnx(folder)
    assert AutoTokenizer.from_pretrained(folder)(SOURCES)["input_ids"] == TOKENIZER(SOURCES)["input_ids"]
    encoder, decoder = (onnx.load(folder / f"{name}.onnx") for name in ("encoder_model", "decoder_model_merged"))
    onnx.checker.check_model(encoder, full_check=True)
    onnx.checker.check_model(decoder, full_check=True)
    source = ["batch_size", "encoder_sequence_length"]
    assert sizes_of(encoder.graph.input) == {"input_ids": source, "attention_mask": source}
    assert sizes_of(encoder.graph.output) == {"last_hidden_state": [*source, 16]}

    def cache(name: str, target_length: str, source_length: str) -> dict[str, list[str | int]]:
        lengths, widths = {"decoder": target_length, "encoder": source_length}, {"key": 3, "value": 5}
        return {
            f"{name}.0.{side}.{kind}": ["batch_size", 2, length, width]
            for side, length in lengths.items()
            for kind, width in widths.items()
        }

    assert sizes_of(decoder.graph.input) == {
        "input_ids": ["batch_size", "decoder_sequence_length"],
        "encoder_attention_mask": source,
        "encoder_hidden_states": [*source, 16],
        **cache("past_key_values", "past_decoder_sequence_length", "past_encoder_sequence_length"),
    }
    longer = "past_decoder_sequence_length + decoder_sequence_length"
    assert sizes_of(decoder.graph.output) == {
        "logits": ["batch_size", "decoder_sequence_length", len(TOKENIZER)],
        **cache("present", longer, "encoder_sequence_length"),
    }
    # The tied table is stored once, and no path of the machine that exported it is in the file.
    data = (folder / "decoder_model_merged.onnx").read_bytes()
    assert len(data) < 4 * sum(parameter.numel() for parameter in model.model.decoder.parameters()) + 60_000
    assert str(TESTS.parent).encode() not in data
    assert b"site-packages" not in data


def sizes_of(values: Any) -> dict[str, list[str | int]]:
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim] for value in values
    }


def test_large_weights_lie_beside_the_graph(export: tuple[Any, Path], monkeypatch: Any, tmp_path: Path) -> None:
    _, folder = export
    monkeypatch.setattr(exporting, "LARGEST_FILE", 1000)
    for path in folder.iterdir():
        if path.suffix == ".onnx":
            exporting._save(onnx_ir.load(path), tmp_path / path.name)
        else:
            shutil.copy(path, tmp_path)
    assert (tmp_path / "encoder_model.onnx_data").stat().st_size > 1000
    inputs = {**make_inputs([4, 2]), "decoder_input_ids": torch.tensor([[0], [0]])}
    outputs = [OnnxModel(each)(**inputs).logits for each in (folder, tmp_path)]
    assert torch.equal(*outputs)


def test_a_wrong_export_is_not_kept(export: tuple[Any, Path], caplog: Any, monkeypatch: Any, tmp_path: Path) -> None:
    _, folder = export
    other = make_model(scale=1.0, seed=1, **MODEL)
    assert compare_onnx(other, folder) > 0.1
    # The graphs of one model, compared with another.
    monkeypatch.setattr(exporting, "_export_encoder", lambda *_: onnx_ir.load(folder / "encoder_model.onnx"))
    monkeypatch.setattr(exporting, "_export_decoder", lambda *_: onnx_ir.load(folder / "decoder_model_merged.onnx"))
    with caplog.at_level(logging.INFO, logger="vanilla_transformer"):
        export_onnx(folder.parent / "model", tmp_path / "same")
    assert (tmp_path / "same" / "tokenizer.json").is_file()
    assert "The logits of ONNX and PyTorch differ by" in caplog.text
    with pytest.raises(ConversionError, match=r"computes something else than the original: logits differ by"):
        export_onnx(other, tmp_path / "different")
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_what_is_refused(export: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = export
    with pytest.raises(FileExistsError):
        export_onnx(model, folder)
    with pytest.raises(ValueError, match="opset is 17; it must be at least 18"):
        export_onnx(model, tmp_path / "exported", opset=17)
    smaller = make_model(vocab_size=len(TOKENIZER) - 1)
    with pytest.raises(ConversionError, match=rf"source vocabulary has the id {len(TOKENIZER) - 1}, and the model"):
        export_onnx(smaller, tmp_path / "exported", tokenizer=TOKENIZER)
    with pytest.raises(FileNotFoundError, match=r"holds no model exported to ONNX"):
        OnnxModel(tmp_path)
    for engine in ("transformers", "ctranslate2"):
        with pytest.raises(ValueError, match="holds a model exported to ONNX: it needs --engine onnx"):
            EngineArguments(model_name_or_path=str(folder), engine=engine).load()
    for name, value in (("dtype", "int8"), ("device", "mps")):
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            load_for_onnx(str(folder), **{name: value})
    exported: Any = OnnxModel(folder)
    with pytest.raises(TypeError, match="output_attentions"):
        exported(**make_inputs([2]), decoder_input_ids=torch.tensor([[0]]), output_attentions=True)
    with pytest.raises(ValueError, match="Give decoder_input_ids"):
        exported(**make_inputs([2]))
    targets = torch.tensor([[1, 0]])
    with pytest.raises(ValueError, match="targets must be padded on the right"):
        exported(**make_inputs([2]), decoder_input_ids=targets, decoder_attention_mask=1 - targets)
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        exported.generate(**make_inputs([2]), cache_implementation="static")
    with pytest.raises(NotImplementedError, match="copy its folder"):
        exported.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_or_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnxscript", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=r"pip install \"vanilla-transformer\[export\]\""):
                export_onnx(make_model(), tmp_path / "exported")
    monkeypatch.setattr(exporting, "transformers_version", "5.12.0")
    with pytest.raises(ImportError, match=r"exporters of transformers, from version 5.15 on; this is 5.12.0"):
        export_onnx(make_model(), tmp_path / "exported")
