"""transformers.js: its own pipeline, in Node, translates as PyTorch does; the files are what it looks for."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import Browser, open_chromium
from letters import TEXTS, TOKENIZER, make_letters_model, train_on_letters
from node_packages import find_node_modules, translate_in_node
from page_server import serve
from tiny_vanilla import TWO_VOCABULARIES, make_model
from tokenizers import Tokenizer
from transformers import AutoConfig, GenerationConfig

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.graphs import copy_for_tracing
from vanilla_transformer.export.transformersjs import (
    EndingDecoderGraph,
    _make_config,
    export_transformersjs,
    find_reasons,
)
from vanilla_transformer.inference.translate import translate

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Of different lengths, so that some end while others go on.
WORDS = ["a", "bcd", "hgfe", "dd", "gabe", "f", "cab"]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, scripts_directory: Path) -> tuple[Any, Path]:
    """A model that reverses letters, with a search that JavaScript lacks, and what the script made of it."""
    folder = tmp_path_factory.mktemp("transformersjs")
    model = make_letters_model(d_k=8, d_v=16)
    train_on_letters(model, folder / "training", reverse=True)
    model.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="gnmt", max_new_tokens=8)
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    arguments = {"model_name_or_path": folder / "model", "format": "transformersjs", "output_dir": folder / "exported"}
    main = runpy.run_path(str(scripts_directory / "export_model.py"))["main"]
    main([f"--{argument}={value}" for argument, value in arguments.items()])
    return model, folder / "exported"


def test_the_files_are_those_that_it_looks_for(export: tuple[Any, Path]) -> None:
    model, folder = export
    graphs = {
        f"onnx/{name}{kind}.onnx" for name in ("encoder_model", "decoder_model_merged") for kind in ("", "_quantized")
    }
    texts = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == graphs | texts
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "marian"
    for name in ("encoder_layers", "decoder_attention_heads", "d_model", "vocab_size", "eos_token_id"):
        assert getattr(config, name) == getattr(model.config, name)
    settings = json.loads((folder / "generation_config.json").read_text())
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    assert settings == {"num_beams": 1, "max_new_tokens": 8, **ids}
    rewritten = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [rewritten.encode(text).ids for text in WORDS] == TOKENIZER(WORDS)["input_ids"]
    for path in (folder / "onnx").iterdir():
        onnx.checker.check_model(onnx.load(path), full_check=True)


def run_graphs(folder: Path, kind: str) -> tuple[Any, Any]:
    """Logits of reversed `TEXTS`, and of a target that has ended."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / "onnx" / f"{name}{kind}.onnx")
        for name in ("encoder_model", "decoder_model_merged")
    )
    batch = {
        name: array.astype(np.int64) for name, array in TOKENIZER(TEXTS, padding=True, return_tensors="np").items()
    }
    (states,) = encoder.run(None, batch)
    inputs = {"encoder_attention_mask": batch["attention_mask"], "encoder_hidden_states": states}
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values."):
            inputs[value.name] = np.zeros((len(TEXTS), value.shape[1], 0, value.shape[3]), dtype=np.float32)
    targets = TOKENIZER([text[::-1] for text in TEXTS], padding=True, return_tensors="np")["input_ids"]
    starts = np.concatenate([np.zeros_like(targets[:, :1]), targets[:, :-1]], axis=1).astype(np.int64)
    (logits,) = decoder.run(["logits"], {"input_ids": starts, **inputs})
    return logits, starts


def test_8_bits_compute_nearly_the_same_in_a_quarter_of_the_space(export: tuple[Any, Path]) -> None:
    _, folder = export
    logits, starts = run_graphs(folder, "")
    rough, _ = run_graphs(folder, "_quantized")
    known = (starts != 1) & (starts != 2)
    assert 0 < np.abs(rough - logits)[known].max() < 0.1 * np.abs(logits[known]).max()
    assert (rough.argmax(-1) == logits.argmax(-1))[known].all()
    for name in ("encoder_model", "decoder_model_merged"):
        graph = onnx.load(folder / "onnx" / f"{name}.onnx").graph
        rough_graph = onnx.load(folder / "onnx" / f"{name}_quantized.onnx").graph
        sizes = [sum(len(each.raw_data) for each in found.initializer) for found in (graph, rough_graph)]
        assert sizes[1] < 0.3 * sizes[0]


def test_what_has_ended_stays_so(export: tuple[Any, Path]) -> None:
    _, folder = export
    for kind in ("", "_quantized"):
        logits, starts = run_graphs(folder, kind)
        ended = starts == 2
        assert ended.any()
        assert (logits.argmax(-1)[ended] == 2).all()
        assert logits[ended].max() == 0


def test_prefixes_are_where_javascript_looks_or_refused() -> None:
    model = make_model()
    entries = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    model.config.task_specific_params = entries
    assert not find_reasons(model)
    assert _make_config(model)["task_specific_params"] == {"translation": entries["translation_en_to_de"]}
    model.config.task_specific_params = entries | {"translation_en_to_fr": {"prefix": "translate English to French: "}}
    assert find_reasons(model) == ["it translates several pairs of languages, of which JavaScript can choose none"]


def test_what_a_training_with_generation_leaves_is_no_setting(tmp_path: Path) -> None:
    model = make_model()
    model.generation_config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    assert find_reasons(model)
    copied, _ = exporting.prepare_export(model, tmp_path / "out", tokenizer=None, opset=exporting.OLDEST_OPSET)
    assert not find_reasons(copied)


def test_an_end_symbol_may_start_a_target() -> None:
    model: Any = make_model(decoder_start_token_id=2)
    graph, copied = EndingDecoderGraph(copy_for_tracing(model)), copy_for_tracing(model)
    inputs = {"input_ids": torch.tensor([[5, 6, 2]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    states = copied.model.encoder(**inputs).last_hidden_state
    heads = model.config.decoder_attention_heads
    nothing = torch.zeros(1, heads, 0, model.config.d_model // heads)
    past = {
        str(number): {side: {"key": nothing, "value": nothing} for side in ("decoder", "encoder")}
        for number in range(model.config.decoder_layers)
    }
    targets = torch.tensor([[2, 7, 2, 7]])
    logits = graph(targets, inputs["attention_mask"], states, past)["logits"]
    expected = copied(**inputs, decoder_input_ids=targets).logits
    torch.testing.assert_close(logits[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    assert logits[0, 2].argmax() == 2


@pytest.mark.parametrize("dtype", ["fp32", "q8"])
def test_its_pipeline_translates_as_pytorch_does(export: tuple[Any, Path], dtype: str) -> None:
    model, folder = export
    # What the model has not learned is decided by so little that 8 bits may decide otherwise.
    words = [*WORDS, " abc", "a'b", "h  g"] if dtype == "fp32" else WORDS
    expected = translate(model, TOKENIZER, words, num_beams=1, max_new_tokens=8, progress=False)
    assert expected[: len(WORDS)] == [word[::-1] for word in WORDS]
    for batch_size in (1, len(words)):
        settings = {"max_new_tokens": 8}
        answer = translate_in_node(folder, words, dtype=dtype, batch_size=batch_size, settings=settings)
        assert answer["ids"] == TOKENIZER(words)["input_ids"]
        assert answer["translations"] == expected


# As its documentation has it for a page that brings its own files.
PAGE = """<!doctype html><meta charset="utf-8"><body><script type="module">
import { env, pipeline } from "/packages/@huggingface/transformers/dist/transformers.min.js";
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = "/models/";
env.backends.onnx.wasm.wasmPaths = "/packages/onnxruntime-web/dist/";
const { words, dtypes } = %s;
try {
  for (const dtype of dtypes) {
    const translator = await pipeline("translation", "letters", { dtype, device: "wasm" });
    const outputs = await translator(words, { max_new_tokens: 8 });
    const line = document.createElement("p");
    line.textContent = outputs.map((output) => output.translation_text).join(" ");
    document.body.append(line);
  }
} catch (error) {
  document.body.append(String(error));
}
document.body.id = "done";
</script>"""


def test_its_pipeline_translates_in_a_browser(export: tuple[Any, Path], tmp_path: Path) -> None:
    packages = find_node_modules("@huggingface/transformers")
    (tmp_path / "index.html").write_text(PAGE % json.dumps({"words": WORDS, "dtypes": ["fp32", "q8"]}))
    folders = {"/": tmp_path, "/packages/": packages, "/models/letters/": export[1]}
    with open_chromium(tmp_path / "profile") as driver, serve(folders) as server:
        driver.get(f"{server.url}/")
        page = Browser(driver)
        page.find("#done")
        assert page.find("body").text.splitlines() == [" ".join(word[::-1] for word in WORDS)] * 2


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 20.0},
    {"min_new_tokens": 3},
    {"suppress_tokens": TOKENIZER.convert_tokens_to_ids(["Ġ", "a", "d"])},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_settings_that_are_taken_over_do_the_same(export: tuple[Any, Path], settings: dict[str, Any]) -> None:
    model, folder = export
    settings = settings | {"max_new_tokens": 8}
    expected = translate(model, TOKENIZER, WORDS, num_beams=1, progress=False, **settings)
    assert expected != [word[::-1] for word in WORDS]
    assert translate_in_node(folder, WORDS, settings=settings)["translations"] == expected


def test_models_that_it_cannot_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, tokenizer: Any = TOKENIZER) -> str:
        with pytest.raises(ConversionError) as error:
            export_transformersjs(model, tmp_path / "exported", tokenizer=tokenizer)
        return str(error.value)

    model: Any = make_letters_model()
    assert "there is none; save it beside the model" in refuse(model, None)
    model.generation_config.update(no_repeat_ngram_size=2, encoder_repetition_penalty=1.5)
    said = refuse(model)
    assert "the generation config sets no_repeat_ngram_size (can be: " in said
    assert "the generation config sets encoder_repetition_penalty" in said
    model = make_letters_model()
    model.generation_config.eos_token_id = [2, 3]
    assert "eos_token_id is [2, 3] (can be: one id)" in refuse(model)
    separate = make_model(**TWO_VOCABULARIES["two-vocabularies-tied"])
    assert "source and target have a vocabulary each" in refuse(separate, None)
    monkeypatch.setattr("vanilla_transformer.export.transformersjs.LARGEST_FILE", 1000)
    assert "its encoder has 0 MB in float32" in refuse(make_letters_model())
    assert not list(tmp_path.iterdir())


def test_a_translation_ends_where_learned_positions_end(tmp_path: Path) -> None:
    find_node_modules("@huggingface/transformers")  # before the export, which takes seconds
    model: Any = make_letters_model(position_embedding_type="learned", max_position_embeddings=12, position_offset=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = 0  # the model never ends by itself
    model.generation_config.max_new_tokens = None
    folder = export_transformersjs(model, tmp_path / "exported", tokenizer=TOKENIZER)
    ended = translate_in_node(folder, ["abc", "d"])["translations"]
    limited = translate_in_node(folder, ["abc", "d"], settings={"max_new_tokens": 9})["translations"]
    assert ended == limited == translate(model, TOKENIZER, ["abc", "d"], max_new_tokens=9, progress=False)
