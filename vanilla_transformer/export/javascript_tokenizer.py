"""A `tokenizer.json` that transformers.js reads as this package's tokenizers are read in Python.

A text gets one space in front, its first piece, and nothing after an added token does. In Python that is done after
the text was cut into pieces, by a step that knows where a piece stood. JavaScript knows only in which section a piece
stood (added tokens lie between sections), so that every piece would get a space. Here is what is done instead:

1. The normalizer puts a mark and a space before each section.
2. Before anything is cut, the same step as in Python puts a space before the first section, which a mark begins.
3. The text is cut: " mark space" and the first piece stay together, and elsewhere "mark space" is a piece.
4. " mark" is taken off, or "mark space": one space remains at the start of the text, and nothing elsewhere.

The mark is a character that no text has once it is in NFC.
"""

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

# The sign of the unit angstrom, of which NFC makes the letter.
_MARK = "\u212b"
# Each has something that a step could get wrong: where spaces stand, marks, digits, contractions, added tokens.
_FRAGMENTS = (
    *("", " ", "  ", "\n", "\t", "\u00a0", "a", "A man", " rides", "1987", "'s", "’ll", "-", "...", "?!", "(", "ſ"),  # noqa: RUF001
    *("é", "e\u0301", "\u0301", "\u212b", "\u00e5", "가", "中文", "हिन्दी"),
    *("😀", "\u200d", "\u0130", "\u1e9b\u0323", "\x00", "�"),
)


def rewrite_for_javascript(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, dict[str, Any]]:
    """Returns what `tokenizer.json` and `tokenizer_config.json` hold for transformers.js, by these names.

    That the ids are the same is tried here, with the library of Python, on texts of all kinds.

    Raises:
        ConversionError: If there is no tokenizer, or JavaScript would read it otherwise.
    """
    refuse("transformers.js cannot use this tokenizer", _find_reasons(tokenizer))
    original: Any = tokenizer
    rewritten = _rewrite(json.loads(original.backend_tokenizer.to_str()))
    found = Tokenizer.from_str(json.dumps(rewritten))
    differing = find_differing_texts(original, found, _make_texts(original))
    refuse("The tokenizer cannot be rewritten for transformers.js", (f"{text!r} has other ids" for text in differing))
    named = {name: str(token) for name, token in original.special_tokens_map.items() if isinstance(token, str)}
    # JavaScript cuts a text that is too long behind its end symbol's place, so no length is told.
    settings = {"tokenizer_class": "PreTrainedTokenizer", "clean_up_tokenization_spaces": False, **named}
    return {"tokenizer.json": rewritten, "tokenizer_config.json": settings}


def find_differing_texts(
    tokenizer: PreTrainedTokenizerBase, rewritten: Tokenizer, texts: Iterable[str], most: int = 3
) -> list[str]:
    """Returns the first texts, at `most`, whose ids are others."""
    others = (text for text in texts if tokenizer(text)["input_ids"] != rewritten.encode(text).ids)
    return list(itertools.islice(others, most))


def _find_reasons(tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return ["there is none; save it beside the model (tokenizer.save_pretrained)"]
    if not isinstance(tokenizer, VanillaTransformerTokenizer):
        return [f"it is a {type(tokenizer).__name__} (can be: a {VanillaTransformerTokenizer.__name__})"]
    if tokenizer.separate_vocabs:
        return ["source and target have a vocabulary each, and transformers.js reads one tokenizer.json for both"]
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    reasons = []
    if content["model"]["type"] != "BPE" or _split_of(content) is None or content["normalizer"] != {"type": "NFC"}:
        reasons.append("it is no byte-level BPE as train_tokenizer makes (other kinds were not tried in JavaScript)")
    if tokenizer.add_bos_token:
        reasons.append("it puts <s> before texts (add_bos_token), with which decoding has rules that only Python knows")
    if tokenizer.padding_side != "right":
        reasons.append(f"padding_side is {tokenizer.padding_side!r} (can be: 'right')")
    for token in content["added_tokens"]:
        if not token["special"] or token["normalized"]:
            reasons.append(f"the added token {token['content']!r} is not special: JavaScript loses spaces beside it")
        elif token["single_word"]:
            reasons.append(f"the added token {token['content']!r} has single_word, of which JavaScript knows nothing")
    return reasons


def _split_of(content: dict[str, Any]) -> str | None:
    """The regular expression that cuts texts into pieces, if the steps are those of `VanillaTransformerTokenizer`."""
    steps = (content["pre_tokenizer"] or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel", "Metaspace", "Metaspace"]:
        return None
    pattern = steps[0]["pattern"].get("Regex")
    expected = VanillaTransformerTokenizer().backend_tokenizer.to_str()
    wanted = json.loads(expected)["pre_tokenizer"]["pretokenizers"]
    return pattern if steps[0]["behavior"] == "Isolated" and steps[1:] == wanted[1:] else None


def _rewrite(content: dict[str, Any]) -> dict[str, Any]:
    pieces = _split_of(content)
    _, spell, prepend, _ = content["pre_tokenizer"]["pretokenizers"]
    mark = {"type": "Prepend", "prepend": f"{_MARK} "}
    cut = {"pattern": {"Regex": f" {_MARK} (?:{pieces})|{_MARK} |{pieces}"}, "behavior": "Isolated"}
    unmark = {"pattern": {"Regex": f" {_MARK}|{_MARK} "}, "behavior": "Removed"}
    splits = [{"type": "Split", **each, "invert": False} for each in (cut, unmark)]
    return content | {
        "normalizer": {"type": "Sequence", "normalizers": [content["normalizer"], mark]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [prepend, *splits, spell]},
        "truncation": None,
        "padding": None,
    }


def _make_texts(tokenizer: VanillaTransformerTokenizer) -> Iterable[str]:
    fragments = [*_FRAGMENTS, *tokenizer.all_special_tokens]
    yield from ("".join(pair) for pair in itertools.product(fragments, repeat=2))
    generator = random.Random(0)
    known = tokenizer.batch_decode([[index] for index in sorted(tokenizer.get_vocab().values())])
    for _ in range(1000):
        yield "".join(generator.choices(fragments, k=2) + generator.choices([" ", *known], k=8))
