"""Tokenizers with two vocabularies, FSMT's above all, and models without any tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_files import write_lines
from library_models import make_tokenizer
from tiny_vanilla import make_model
from transformers import FSMTTokenizer, PreTrainedTokenizerBase

from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.data.vocabularies import get_vocabularies, load_tokenizer
from vanilla_transformer.export.ctranslate2 import export_ctranslate2
from vanilla_transformer.export.ctranslate2_model import CTranslate2Model, load_for_ctranslate2
from vanilla_transformer.hub.checks import check_model_folder
from vanilla_transformer.inference.files import describe_settings, translate_file
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.losses import score_loss
from vanilla_transformer.inference.translate import translate

TEXTS = ["a man rides a horse", "two dogs run"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "progress": False}


def make_fsmt_tokenizer(folder: Path, target: str = "zyxwvutsrqponmlkjihgfedcba.&;ü") -> FSMTTokenizer:
    """A tokenizer of letters, in the files of wmt19 models; its vocabularies differ in size and order."""
    pytest.importorskip("sacremoses")
    folder.mkdir(parents=True, exist_ok=True)
    for name, letters in (("src", "abcdefghijklmnopqrstuvwxyz"), ("tgt", target)):
        tokens = [*SPECIAL, *letters, *(f"{letter}</w>" for letter in letters)]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        (folder / f"vocab-{name}.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("", encoding="utf-8")
    settings = {"tokenizer_class": "FSMTTokenizer", "langs": ["en", "de"], "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return FSMTTokenizer.from_pretrained(folder)


def make_model_for(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Any:
    source, target = get_vocabularies(tokenizer)
    sizes: dict[str, Any] = {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    model = make_model(**sizes, share_encoder_decoder_embeddings=False, decoder_start_token_id=2, **changes)
    model.generation_config.bad_words_ids = [[index] for index in range(4) if index != 2]
    return model


def refuse(script: Any, *words: Any, capsys: Any) -> str:
    with pytest.raises(SystemExit):
        script(*words)
    return " ".join(capsys.readouterr().err.split())


def test_vocabularies_of_ours_and_of_the_library() -> None:
    for tokenizer in (train_tokenizer(TEXTS, vocab_size=270), make_tokenizer()):
        source, target = get_vocabularies(tokenizer)
        assert source is target
        assert source == tokenizer.get_vocab()
    separate = train_separate_tokenizer(TEXTS, [text.upper() for text in TEXTS], vocab_size=268)
    source, target = get_vocabularies(separate)
    assert (len(source), len(target)) == (len(separate), separate.target_vocab_size)
    assert set(source) - set(target)
    assert target == separate.target_tokenizer.get_vocab()


def test_two_vocabularies_of_fsmt(tmp_path: Path) -> None:
    tokenizer = make_fsmt_tokenizer(tmp_path)
    source, target = get_vocabularies(tokenizer)
    assert (len(source), len(target)) == (4 + 2 * 26, 4 + 2 * 30)
    assert list(source.values()) == tokenizer.convert_tokens_to_ids(list(source))
    assert list(target) == tokenizer.convert_ids_to_tokens(list(target.values()))
    assert source["a"] != target["a"]


def test_a_target_vocabulary_decides_whether_a_file_is_resumed(tmp_path: Path) -> None:
    tokenizer, other = make_fsmt_tokenizer(tmp_path / "a"), make_fsmt_tokenizer(tmp_path / "b", target="abc.&;ü")
    model = make_model_for(tokenizer)
    source = write_lines(tmp_path / "source.txt", TEXTS)
    own, others = (describe_settings(model, each, {}) for each in (tokenizer, other))
    assert [name for name in own if own[name] != others[name]] == ["vocabulary"]
    assert translate_file(model, tokenizer, source, tmp_path / "target.txt", **SETTINGS) == 2


def test_ctranslate2_has_both_vocabularies_of_fsmt(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    tokenizer = make_fsmt_tokenizer(tmp_path / "tokenizer")
    ours = make_model_for(tokenizer)
    exported = export_ctranslate2(ours, tmp_path / "exported", tokenizer=tokenizer)
    theirs, reloaded = load_for_ctranslate2(str(exported), device="cpu")
    ids = list(range(len(theirs.target_tokens)))
    assert theirs.target_tokens == tokenizer.convert_ids_to_tokens(ids)
    assert theirs.source_tokens[4:6] == ["a", "b"]
    assert translate(theirs, reloaded, TEXTS, **SETTINGS) == translate(ours, tokenizer, TEXTS, **SETTINGS)


def test_a_model_with_fsmts_tokenizer_can_be_pushed(tmp_path: Path) -> None:
    tokenizer = make_fsmt_tokenizer(tmp_path / "model")
    model = make_model_for(tokenizer, bos_token_id=0, pad_token_id=1, eos_token_id=2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # Without a card, which is what is left to complain of, no other process is started.
    assert [problem.check for problem in check_model_folder(tmp_path / "model")] == ["card"]
    make_fsmt_tokenizer(tmp_path / "model", target="zyxwvutsrqponmlkjihgfedcba.&;üö")
    messages = [problem.message for problem in check_model_folder(tmp_path / "model")]
    assert any("has 66 target tokens, but config.json says decoder_vocab_size=64" in message for message in messages)


def test_references_for_fsmt_are_refused_at_once(main: Any, tmp_path: Path, capsys: Any) -> None:
    tokenizer = make_fsmt_tokenizer(tmp_path / "model")
    model = make_model_for(tokenizer)
    with pytest.raises(ValueError, match="FSMTTokenizer cannot encode target texts"):
        score_loss(model, tokenizer, TEXTS, TEXTS, progress=False)
    model.save_pretrained(tmp_path / "model")
    test_files = [write_lines(tmp_path / name, TEXTS) for name in ("test.en", "test.de")]
    words = ["--model_name_or_path", tmp_path / "model", "--test_file", *test_files]
    words += ["--device", "cpu", "--output_dir", tmp_path / "scores"]
    said = refuse(main("evaluate_translation"), *words, capsys=capsys)
    assert "give the file to `evaluate --compare`" in said
    assert not list((tmp_path / "scores").iterdir())


def test_a_tokenizer_is_found_where_there_is_one(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    assert load_tokenizer(tmp_path / "model") is None
    with pytest.raises(ValueError, match=r"model has no tokenizer, .*save one beside the model"):
        load_model_and_tokenizer(str(tmp_path / "model"), device="cpu")
    tokenizer = train_tokenizer(TEXTS, vocab_size=270)
    tokenizer.save_pretrained(tmp_path / "model")
    found: Any = load_tokenizer(str(tmp_path / "model"))
    assert found.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(OSError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere" / "at" / "all")


def test_a_model_without_a_tokenizer_is_exported_but_translates_no_text(main: Any, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("ctranslate2")
    ours: Any = make_model(vocab_size=17)
    ours.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a man\n", encoding="utf-8")
    place = ["--model_name_or_path", tmp_path / "model"]
    main("export_model")(*place, "--format", "ctranslate2", "--output_dir", tmp_path / "exported")
    assert "The model has no tokenizer" in capsys.readouterr().out
    tokens = json.loads((tmp_path / "exported" / "shared_vocabulary.json").read_text(encoding="utf-8"))
    assert tokens == [str(index) for index in range(17)]
    assert not (tmp_path / "exported" / "tokenizer.json").exists()
    export_ctranslate2(tmp_path / "model", tmp_path / "again")
    for folder, engine in (("model", "transformers"), ("model", "ctranslate2"), ("exported", "ctranslate2")):
        words = ["--model_name_or_path", tmp_path / folder, "--engine", engine, "--device", "cpu"]
        said = refuse(main("translate"), *words, "--input_file", tmp_path / "text.txt", capsys=capsys)
        assert f"{folder} has no tokenizer" in said
    ids = torch.tensor([[5, 6, 2]])
    theirs = CTranslate2Model(tmp_path / "again", device="cpu")
    assert torch.equal(theirs.generate(ids, max_new_tokens=6), ours.generate(ids, max_new_tokens=6))
