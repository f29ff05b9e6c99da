"""Packages for Argos Translate: the oracles are this package's CTranslate2 engine, and argostranslate itself."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vanilla import make_model
from transformers import AutoTokenizer, MarianTokenizer

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.marian import convert_marian, save_as_marian
from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.export.argos import export_argos
from vanilla_transformer.export.ctranslate2 import export_ctranslate2
from vanilla_transformer.export.ctranslate2_model import CTranslate2Model
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.tasks import record_directions

pytest.importorskip("ctranslate2")
sentencepiece = pytest.importorskip("sentencepiece")

WORDS = ["Haus", "Häuser", "kleine", "Straße", "the", "old", "house", "houses", "stands", "sleep", "sun", "zwölf"]
SENTENCES = [" ".join(random.Random(seed).choices(WORDS, k=5)) + "." for seed in range(200)]
TEXTS = [*SENTENCES[:12], "unknown Ж中 signs.", "3 houses!", "a", "</s> the <unk>", ""]
KINDS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 330},
}
# As Argos Translate searches; the engine goes on for longer by default.
SEARCH: dict[str, Any] = {"num_beams": 4, "length_penalty": 0.2, "length_penalty_type": "transformers"}


@pytest.fixture(scope="module")
def spm_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, files = tmp_path_factory.mktemp("spm"), {}
    for name, changes in KINDS.items():
        written = io.BytesIO()
        options = {"vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **changes}
        sentences = iter(SENTENCES)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=written, **options)
        files[name] = folder / f"{name}.model"
        files[name].write_bytes(written.getvalue())
    return files


def make(tokenizer: Any, steps: int = 0, *, normalize_before: bool = True) -> Any:
    """A small model, which in some steps learns to write sentences of the known words, and to end them."""
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": 48, "max_position_embeddings": 300}
    if tokenizer.separate_vocabs:
        sizes |= {"decoder_vocab_size": tokenizer.target_vocab_size, "share_encoder_decoder_embeddings": False}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "eos")}
    start = {"decoder_start_token_id": tokenizer.bos_token_id, "langs": ["en", "de"]}
    model = make_model(**sizes, **ids, **start, normalize_before=normalize_before, scale=0.1).train()
    batch = tokenizer(SENTENCES, text_target=SENTENCES, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(steps):
        rows = {name: tensor[step % 5 :: 5] for name, tensor in batch.items()}
        model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def translate_by_engine(model: Any, tokenizer: Any, folder: Path, texts: list[str]) -> list[str]:
    engine = CTranslate2Model(export_ctranslate2(model, folder, tokenizer=tokenizer), device="cpu", patience=1.0)
    # Literal special tokens are text to sentencepiece, and so they must be here.
    tokenizer.split_special_tokens = True
    found = translate(engine, tokenizer, texts, **SEARCH, max_new_tokens=256)
    tokenizer.split_special_tokens = False
    return [str(text) for text in found]


def translate_by_package(package: Path, texts: list[str]) -> list[str]:
    """By the calls that argostranslate makes (1.11, `translate.apply_packaged_translation`)."""
    import ctranslate2

    processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(package / "model"))
    cut = [processor.encode(text, out_type=str) for text in texts]
    settings = {"max_batch_size": 32, "batch_type": "tokens", "beam_size": 4, "length_penalty": 0.2}
    found = translator.translate_batch(cut, replace_unknowns=True, **settings)
    return [processor.decode_pieces(each.hypotheses[0]).replace("▁", " ").removeprefix(" ") for each in found]


def unpack(folder: Path, place: Path) -> Path:
    [package] = folder.iterdir()
    with zipfile.ZipFile(package) as archive:
        archive.extractall(place)
    return place / package.stem


@pytest.mark.parametrize("sides", [["unigram"], ["bytes"], ["unigram", "bpe"]])
def test_a_package_translates_as_the_engine_does(sides: list[str], spm_files: dict[str, Path], tmp_path: Path) -> None:
    own = spm_files[sides[1]] if len(sides) > 1 else None
    tokenizer = convert_sentencepiece(spm_files[sides[0]], target_model_file=own)
    model = make(tokenizer, steps=150)
    expected = translate_by_engine(model, tokenizer, tmp_path / "engine", TEXTS)
    assert len(set(expected)) > 10
    package = unpack(export_argos(model, tmp_path / "exported", tokenizer=tokenizer), tmp_path)
    names = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    vocabularies = (
        {"model/shared_vocabulary.json"}
        if own is None
        else {"model/source_vocabulary.json", "model/target_vocabulary.json"}
    )
    assert names == {
        "metadata.json",
        "README.md",
        "sentencepiece.model",
        "model/model.bin",
        "model/config.json",
        *vocabularies,
    }
    assert (package / "sentencepiece.model").read_bytes() == spm_files[sides[0]].read_bytes()
    # An empty text is none to the engine, and a sentence here.
    assert translate_by_package(package, TEXTS)[:-1] == expected[:-1]


def test_opus_mt_becomes_a_package(spm_files: dict[str, Path], tmp_path: Path) -> None:
    """With a `MarianTokenizer`, and padding that is never written."""
    own = convert_sentencepiece(spm_files["unigram"], target_model_file=spm_files["bpe"])
    marian = save_as_marian(make(own, steps=150, normalize_before=False), own, tmp_path / "marian")
    converted = convert_marian(str(marian))
    model, tokenizer = converted.model, converted.tokenizer
    assert isinstance(tokenizer, MarianTokenizer)
    with torch.no_grad():
        model.lm_head.bias[tokenizer.pad_token_id] = 9.0  # it would be written
    model.generation_config.update(bad_words_ids=[[tokenizer.pad_token_id]], renormalize_logits=True)
    texts = [text for text in TEXTS if text and "</s>" not in text]
    expected = translate_by_engine(model, tokenizer, tmp_path / "engine", texts)
    assert len(set(expected)) > 10
    package = unpack(export_argos(model, tmp_path / "exported", tokenizer=tokenizer), tmp_path)
    assert translate_by_package(package, texts) == expected
    assert model.lm_head.bias[tokenizer.pad_token_id] == 9
    tokenizer.supported_language_codes = [">>de<<", ">>nl<<"]
    with pytest.raises(ConversionError, match="it wants one of >>de<<, >>nl<< before each source"):
        export_argos(model, tmp_path / "several", tokenizer=tokenizer)
    model.config.lm_head_bias = False
    with pytest.raises(ConversionError, match="its search forbids tokens"):
        export_argos(model, tmp_path / "several", tokenizer=tokenizer)


def test_what_the_package_says_of_itself(spm_files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = convert_sentencepiece(spm_files["unigram"])
    splitter = tmp_path / "en.onnx"
    splitter.write_bytes(b"any")
    options: dict[str, Any] = {"target_lang": "pb", "package_version": "1.10", "sentence_splitter": splitter}
    folder = export_argos(make(tokenizer), tmp_path / "new", tokenizer=tokenizer, quantization="int8", **options)
    assert [path.name for path in folder.iterdir()] == ["translate-en_pb-1_10.argosmodel"]
    package = unpack(folder, tmp_path)
    assert json.loads((package / "metadata.json").read_text()) == {
        "package_version": "1.10",
        "argos_version": "1.9.0",
        "from_code": "en",
        "from_name": "English",
        "to_code": "pb",
        "to_name": "Portuguese (Brazil)",
    }
    assert (package / "minisbd" / "en.onnx").read_bytes() == b"any"
    assert (package / "README.md").read_text().startswith("# English to Portuguese (Brazil)\n")
    config = json.loads((package / "model" / "config.json").read_text())
    assert (config["add_source_bos"], config["add_source_eos"]) == (False, True)


class TestRefusals:
    def test_all_reasons_are_listed(self, spm_files: dict[str, Path], tmp_path: Path) -> None:
        tokenizer = convert_sentencepiece(spm_files["unigram"], target_model_file=spm_files["bytes"])
        model = make(tokenizer)
        tokenizer.add_tokens(["houseboat"])
        model.config.langs = None
        model.config.task_specific_params = {"translation": {"prefix": "to German: "}}
        options: dict[str, Any] = {"source_lang": "English", "package_version": "new", "sentence_splitter": "en.pt"}
        with pytest.raises(ConversionError) as refused:
            export_argos(model, tmp_path / "new", tokenizer=tokenizer, **options)
        message = str(refused.value)
        assert message.count("\n  - ") == 7
        for part in (
            "1 tokens that sentencepiece does not know were added to its tokenizer, first 'houseboat'",
            "its target's sentencepiece model spells characters in bytes",
            "it wants 'to German: ' before each source",
            "source_lang is 'English' (can be: a code of ISO 639",
            "target_lang is None",
            "package_version is 'new'",
            "sentence_splitter is 'en.pt'",
        ):
            assert part in message, message
        assert not (tmp_path / "new").exists()
        record_directions(model.config, {("en", "de"): "<2de>", ("en", "fr"): "<2fr>"})
        with pytest.raises(ConversionError, match="it translates several pairs of languages"):
            export_argos(model, tmp_path / "new", tokenizer=tokenizer, **options)

    def test_a_prefix_of_another_task(self, spm_files: dict[str, Path], tmp_path: Path) -> None:
        tokenizer = convert_sentencepiece(spm_files["unigram"])
        model = make(tokenizer)
        model.config.task_specific_params = {"text2text-generation": {"prefix": "correct: "}}
        with pytest.raises(ConversionError, match="it wants 'correct: ' before each source"):
            export_argos(model, tmp_path / "new", tokenizer=tokenizer, source_lang="en", target_lang="de")

    def test_other_tokenizers(self, tmp_path: Path) -> None:
        tokenizer = train_tokenizer(SENTENCES, vocab_size=300, show_progress=False)
        model = make(tokenizer)
        with pytest.raises(
            ConversionError, match="has a VanillaTransformerTokenizer that was not made from a sentence"
        ):
            export_argos(model, tmp_path / "new", tokenizer=tokenizer)
        with pytest.raises(ConversionError, match=r"has no tokenizer .* --tokenizer_name spm\.model"):
            export_argos(model, tmp_path / "new")


# Installs a package from its file, and translates with it.
PROGRAM = """
import json, sys
from argostranslate import package, translate
path, texts = sys.argv[1], json.loads(sys.argv[2])
package.install_from_path(path)
[installed] = package.get_installed_packages()
print(json.dumps([str(installed), *(translate.translate(text, "en", "de") for text in texts)]))
"""


def write_splitter(path: Path) -> Path:
    """A model in MiniSBD's form: sentences end at each "." and at the end."""
    import onnx
    from onnx import TensorProto, helper

    vocab = {"_unit2id": {"<PAD>": 0, "<UNK>": 1, ".": 2}, "_id2unit": ["<PAD>", "<UNK>", "."], "lang": "en"}
    initial = [
        helper.make_tensor("dot", TensorProto.INT64, [], [2]),
        helper.make_tensor("half", TensorProto.FLOAT, [1, 1, 1], [0.5]),
        helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        helper.make_tensor("before", TensorProto.FLOAT, [1, 1, 2], [0.4, 0.0]),
    ]
    nodes = [
        helper.make_node("Equal", ["units", "dot"], ["is_dot"]),
        helper.make_node("Cast", ["is_dot"], ["dots"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["dots", "last"], ["ends"]),
        helper.make_node("Max", ["ends", "features"], ["end"]),
        helper.make_node("Mul", ["end", "half"], ["zero"]),
        helper.make_node("Sub", ["half", "zero"], ["nothing"]),
        helper.make_node("Sub", ["zero", "zero"], ["none"]),
        helper.make_node("Concat", ["nothing", "none", "end"], ["output"], axis=2),
    ]
    inputs = [
        helper.make_tensor_value_info("units", TensorProto.INT64, ["batch", "time"]),
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "time", 1]),
    ]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", "time", 3])]
    graph = helper.make_graph(nodes, "splitter", inputs, outputs, initial[:3])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    config = {"feat_funcs": ["end_of_para"], "max_seqlen": 1000, "batch_size": 1}
    helper.set_model_props(model, {"lang_code": "en", "config": json.dumps(config), "vocab": json.dumps(vocab)})
    onnx.save(model, path)
    return path


@pytest.mark.skipif(find_spec("argostranslate") is None, reason="pip install --no-deps argos-translate-lt minisbd")
@pytest.mark.parametrize("sides", [["unigram"], ["bpe", "unigram"]])
def test_argostranslate_installs_and_runs_it(sides: list[str], spm_files: dict[str, Path], tmp_path: Path) -> None:
    own = spm_files[sides[1]] if len(sides) > 1 else None
    tokenizer: Any = convert_sentencepiece(spm_files[sides[0]], target_model_file=own)
    model = make(tokenizer, steps=150)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    texts = [text for text in TEXTS if text and not text.startswith("</s>")]
    splitter = write_splitter(tmp_path / "en.onnx")
    folder = export_argos(model, tmp_path / "exported", tokenizer=tokenizer, sentence_splitter=splitter)
    [package] = folder.iterdir()
    # All of its folders are within this one, and nothing is to be fetched.
    places = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("DATA", "CONFIG", "CACHE")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(package), json.dumps([*texts, f"{texts[0]} {texts[1]}"])],
        env={**os.environ, **places, "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    name, *found = json.loads(ran.stdout.splitlines()[-1])
    assert name == "English → German"
    expected = translate_by_engine(model, tokenizer, tmp_path / "engine", texts)
    assert found[:-1] == expected
    # Two sentences were told apart.
    assert found[-1].replace(" ", "") == (expected[0] + expected[1]).replace(" ", "")
