"""What the tiny BART translates, one call of `generate` per sentence, and the end of a run in the middle of a file."""

import functools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_seq2seq import MAX_TOKENS, WORDS, make_model, make_tokenizer

from vanilla_transformer.inference import files, parts

MODEL: Any = make_model()
TOKENIZER = make_tokenizer()


def random_sentences(count: int, *, seed: int = 0, longest: int = 12) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


@functools.cache
def translate_alone(sentence: str, **generate_kwargs: Any) -> str:
    """The oracle: a plain call of `generate`, without batch, padding or order."""
    if not sentence.strip():
        return ""
    token_ids = torch.tensor([[*map(TOKENIZER.convert_tokens_to_ids, sentence.split()), TOKENIZER.eos_token_id]])
    with torch.no_grad():
        (output,) = MODEL.generate(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **generate_kwargs)
    words = TOKENIZER.convert_ids_to_tokens(output.tolist())
    return " ".join(word for word in words if word not in ("<s>", "<pad>", "</s>", "<unk>"))


def save_model(folder: Path) -> str:
    MODEL.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def write_sources(path: Path) -> Path:
    """A file of 23 lines, one of them empty and the last too long."""
    lines = ["w1 w2", "", *random_sentences(20), " ".join(WORDS[:30])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def expected_translation(source_file: Path) -> str:
    truncated = (line.split()[: MAX_TOKENS - 1] for line in source_file.read_text(encoding="utf-8").splitlines())
    return "".join(translate_alone(" ".join(words)) + "\n" for words in truncated)


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a translation, as Ctrl-C does, when it writes the part that follows so many."""
    written = 0

    def write_whole(path: Path, lines: Iterable[str]) -> None:
        nonlocal written
        if written == count:
            raise KeyboardInterrupt
        written += 1
        parts.write_whole(path, lines)

    monkeypatch.setattr(files, "write_whole", write_whole)


def run_interrupted(
    count: int, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Calls a function that translates a file, and ends it after so many parts."""
    with monkeypatch.context() as patch:
        interrupt_after(count, patch)
        with pytest.raises(KeyboardInterrupt):
            function(*args, **options)
