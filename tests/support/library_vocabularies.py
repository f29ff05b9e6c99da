"""Tokenizers of MarianMT and FSMT, written in the files of opus-mt and wmt19."""

import io
import json
from pathlib import Path
from typing import Any

SENTENCES = ["a man rides a horse .", "two dogs run over the old bridge", "the sun is shining", "a dog"]
GERMAN = ["ein mann reitet auf einem pferd .", "zwei hunde laufen über die alte brücke", "die sonne scheint"]
GERMAN += ["ein hund"]


def train_pieces(texts: list[str], vocab_size: int) -> tuple[bytes, list[str]]:
    """A sentencepiece model and what it cuts texts into."""
    import sentencepiece

    written = io.BytesIO()
    options: dict[str, Any] = {"vocab_size": vocab_size, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=written, **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return written.getvalue(), [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]


def write_marian_vocabulary(folder: Path, *, separate: bool = False) -> tuple[int, int]:
    """Writes a tokenizer in the files of opus-mt, padding last; returns the number of source and of target tokens."""
    names: dict[str, Any] = {"source_lang": "en", "target_lang": "de"}
    pieces = {}
    for side, texts, size in (("source", SENTENCES, 26), ("target", GERMAN, 28)):
        model, pieces[side] = train_pieces(texts, size)
        (folder / f"{side}.spm").write_bytes(model)
    if separate:
        names["separate_vocabs"] = True
        # A model has one id for padding, so both vocabularies have as many tokens.
        size = min(map(len, pieces.values()))
        vocabularies = [pieces["source"][:size], pieces["target"][:size]]
    else:
        vocabularies = [sorted({*pieces["source"], *pieces["target"]})]
    sizes = []
    for name, tokens in zip(("vocab.json", "target_vocab.json"), vocabularies, strict=False):
        vocabulary = {token: index for index, token in enumerate(["</s>", "<unk>", *tokens, "<pad>"])}
        (folder / name).write_text(json.dumps(vocabulary), encoding="utf-8")
        sizes.append(len(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return sizes[0], sizes[-1]


def write_fsmt_vocabulary(folder: Path) -> tuple[int, int]:
    """Letters, a few merges, two vocabularies of different sizes, which are returned."""
    letters = "abcdefghijklmnopqrstuvwxyz.&;ü"
    merges = [("t", "h"), ("th", "e</w>"), ("o", "g"), ("u", "n</w>"), ("d", "og</w>")]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    for name, tokens in {"vocab-src.json": pieces, "vocab-tgt.json": list(reversed(pieces))[3:]}.items():
        vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *tokens])}
        (folder / name).write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("".join(f"{' '.join(merge)} 9\n" for merge in merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"langs": ["en", "de"], "model_max_length": 1024}))
    return len(pieces) + 4, len(pieces) + 1
