"""The folder of a page: what is in it, that its modules translate in Node as PyTorch does, and what is refused."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from letters import TOKENIZER, make_letters_model, train_on_letters
from node_packages import find_node_modules, run_node

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.transformersjs import find_reasons
from vanilla_transformer.export.web import export_web
from vanilla_transformer.export.web.folder import KNOWN, PACKAGES, PAGE_FILES, make_settings
from vanilla_transformer.tasks import TASKS, TRANSLATION, record_task

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Of different lengths; the last are unlike what was learned, so that beams come close to each other.
WORDS = ["a", "bcd", "hgfe", "dd", "gabe", "f", "cab", " abc", "a'b", "h  g", "Xyz 1987", "é"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that reverses letters and is not sure of itself."""
    found = make_letters_model(d_k=8, d_v=16, langs=["en", "de"])
    train_on_letters(found, tmp_path_factory.mktemp("letters"), reverse=True, steps=60)
    found.generation_config.max_new_tokens = None
    found.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="gnmt")
    return found.eval()


@pytest.fixture(scope="module")
def page(model: Any, tmp_path_factory: pytest.TempPathFactory, scripts_directory: Path) -> Path:
    """What the script made of it, in float32."""
    packages = find_node_modules("@huggingface/transformers")
    folder = tmp_path_factory.mktemp("web")
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    main = runpy.run_path(str(scripts_directory / "export_model.py"))["main"]
    options = {"model_name_or_path": folder / "model", "format": "web", "output_dir": folder / "page"}
    options |= {"node_modules": packages, "quantization": "float32"}
    main([*(f"--{name}={value}" for name, value in options.items()), "--examples", "abc", "<b>"])
    return folder / "page"


def test_a_page_puts_the_models_prefix_before_texts() -> None:
    model: Any = make_letters_model(langs=["en", "de"])
    record_task(model.config, TRANSLATION, prefix="to German: ", langs=["en", "de"])
    assert make_settings(model, TOKENIZER)["prefix"] == "to German: "
    record_task(model.config, TASKS["summarization"], prefix="sum: ")
    assert make_settings(model, TOKENIZER)["prefix"] == "sum: "


def test_pages_are_for_one_pair_of_languages() -> None:
    model = make_letters_model()
    assert not find_reasons(model, KNOWN)
    model.config.task_specific_params = {"translation_en_to_de": {}, "translation_de_to_en": {}}
    assert find_reasons(model, KNOWN) == [
        "it translates several pairs of languages, of which JavaScript can choose none"
    ]


def test_the_folder_is_whole(page: Path) -> None:
    own = {path.relative_to(page).as_posix() for path in page.rglob("*") if path.is_file()}
    runtime = {f"runtime/{Path(file).name}" for _, files in PACKAGES.values() for file in files}
    model = {f"model/{name}" for name in ("encoder.onnx", "decoder.onnx", "tokenizer.json", "tokenizer_config.json")}
    assert own == {*PAGE_FILES, "README.md", "settings.json"} | runtime | model
    settings = json.loads((page / "settings.json").read_text())
    assert settings["files"] == {name: (page / name).stat().st_size for name in runtime | model}
    assert settings["examples"] == ["abc", "<b>"]
    assert settings["languages"] == ["en", "de"]
    worker = (page / "service-worker.js").read_text()
    assert "@" not in worker.replace("@type", "").replace("@param", "").replace("@returns", "")
    for name in {*PAGE_FILES, "settings.json"} - {"service-worker.js"}:
        assert f'"{name}"' in worker
    card = (page / "README.md").read_text()
    assert "sdk: static" in card
    assert "cross-origin-embedder-policy: require-corp" in card


SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"numBeams": 1}, {}),
    ({"numBeams": 2}, {}),
    ({"numBeams": 4, "numWanted": 4}, {}),
    ({"numBeams": 8, "numWanted": 3}, {"length_penalty": 0.0}),
    ({"numBeams": 4}, {"length_penalty": 1.5}),
    ({"numBeams": 4, "numWanted": 2}, {"early_stopping": True}),
    ({"numBeams": 4, "numWanted": 2}, {"length_penalty_type": "transformers", "length_penalty": 1.0}),
    ({"numBeams": 4}, {"length_penalty_type": "transformers", "early_stopping": True, "length_penalty": 1.0}),
    ({"numBeams": 4}, {"length_penalty_type": "transformers", "early_stopping": "never", "length_penalty": 2.0}),
]


@pytest.mark.parametrize(("options", "search"), SEARCHES, ids=str)
def test_it_finds_what_pytorch_finds(model: Any, page: Path, options: dict[str, Any], search: dict[str, Any]) -> None:
    answer = run_node("web_page.mjs", page, request={"texts": WORDS, "options": options, "search": search})
    assert answer["sources"] == TOKENIZER(WORDS)["input_ids"]
    settings = {"num_beams": options["numBeams"], "num_return_sequences": options.get("numWanted", 1), **search}
    generation = {"return_dict_in_generate": True, "output_scores": options["numBeams"] > 1, **settings}
    for word, result in zip(WORDS, answer["results"], strict=True):
        inputs = TOKENIZER(word, return_tensors="pt")
        expected = model.generate(**inputs, **generation)
        tokens = [[token for token in row[1:] if token != 1] for row in expected.sequences.tolist()]
        assert [each["tokens"] for each in result["translations"]] == tokens, word
        texts = TOKENIZER.batch_decode(expected.sequences, skip_special_tokens=True)
        assert [each["text"] for each in result["translations"]] == texts
        if options["numBeams"] > 1:
            found = [each["score"] for each in result["translations"]]
            assert found == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_a_page_with_8_bits_knows_where_learned_positions_end(tmp_path: Path) -> None:
    packages = find_node_modules("@huggingface/transformers")
    limited = make_letters_model(position_embedding_type="learned", max_position_embeddings=12, position_offset=2)
    limited.generation_config.max_new_tokens = None
    folder = export_web(limited, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages)
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["max_source_tokens"], settings["max_target_tokens"]) == (10, 10)
    texts = ["abc", "a" * 30, "", " \n"]
    answer = run_node("web_page.mjs", folder, request={"texts": texts, "options": {"numBeams": 4}})
    for result in answer["results"][:2]:
        assert 1 <= len(result["translations"][0]["tokens"]) <= 10
    assert [result["isCut"] for result in answer["results"]] == [False, True, False, False]
    assert answer["sources"][0] == TOKENIZER("abc")["input_ids"]
    assert answer["sources"][1] == TOKENIZER(texts[1], truncation=True, max_length=10)["input_ids"]
    assert [result["translations"] for result in answer["results"][2:]] == [[], []]


def test_what_a_page_cannot_do_is_refused(tmp_path: Path) -> None:
    model = make_letters_model()
    missing = tmp_path / "node_modules"
    with pytest.raises(FileNotFoundError, match=r"npm install --prefix .* --no-save --ignore-scripts onnxruntime-web@"):
        export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=missing)
    packages = find_node_modules("@huggingface/transformers")
    model.generation_config.update(repetition_penalty=1.5)
    with pytest.raises(ConversionError, match=r"the generation config sets repetition_penalty \(can be: "):
        export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages)
    model.config.task_specific_params = {"translation_en_to_de": {}, "translation_de_to_en": {}}
    with pytest.raises(ConversionError, match="it translates several pairs of languages"):
        export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages)
    model.config.task_specific_params = {"summarization": {}}
    with pytest.raises(ConversionError, match="it is for summarization, and the page takes each line by itself"):
        export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages)
    quantization: Any = "int4"
    with pytest.raises(ValueError, match=r"quantization is 'int4'; for a page it must be one of \['int8', 'float32'\]"):
        export_web(model, tmp_path / "page", tokenizer=TOKENIZER, node_modules=packages, quantization=quantization)
    assert not list(tmp_path.iterdir())
