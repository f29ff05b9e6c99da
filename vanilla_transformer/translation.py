"""Batch translation with any sequence-to-sequence model: sentences, streams of lines, and files.

Sentences are sorted by their number of tokens, longest first, so that a batch holds little padding and the batch that
needs the most memory comes first; the translations come back in the order of the input. Three promises hold throughout:

- Every input gives exactly one output. A source that is empty or only white space gives an empty translation without
  asking the model, which would make something up.
- A source longer than the limit is truncated, and a warning names its line.
- The model's training flags are left as they were found.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from .data import open_text

logger = logging.getLogger(__name__)

# A tokenizer that knows no limit says 1e30.
_NO_LENGTH_LIMIT = 10**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str = "auto") -> torch.device:
    """The device called `name`; `"auto"` takes the first of CUDA, MPS and CPU that this machine has."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_model_and_tokenizer(
    model_name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a sequence-to-sequence model, in evaluation mode and on its device, and its tokenizer.

    Args:
        model_name_or_path: A folder or a name on the Hub.
        device: `"auto"` (see [`select_device`]) or a torch device such as `"cuda:1"`.
        dtype: `"auto"` (as saved), `"float32"`, `"bfloat16"` or `"float16"`.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code from the checkpoint may run.

    Raises:
        ValueError: If `dtype` is none of those names.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {['auto', *_DTYPES]}.")
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, dtype=_DTYPES.get(dtype, "auto"), **source)
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **source)
    return model.to(select_device(device)).eval(), tokenizer


def is_multilingual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer marks source and target with a language's token."""
    return hasattr(tokenizer, "set_src_lang_special_tokens")


def set_languages(tokenizer: PreTrainedTokenizerBase, *, source_lang: str, target_lang: str) -> dict[str, int]:
    """Sets the languages of a multilingual tokenizer (NLLB, M2M100, mBART-50 and their like).

    Args:
        tokenizer: Its `src_lang` and `tgt_lang` are set.
        source_lang: The source language, in the tokenizer's own spelling (`"eng_Latn"`, `"en"`, `"en_XX"`).
        target_lang: The target language, spelled likewise.

    Returns:
        The argument that `generate` needs to write in that language: `{"forced_bos_token_id": ...}`.

    Raises:
        ValueError: If the tokenizer has no languages or does not know one of these.
    """
    if not is_multilingual(tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} translates one fixed pair of languages; got source_lang={source_lang!r} and "
            f"target_lang={target_lang!r}, which must be left out."
        )
    to_id: Callable[[str], Any] = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
    identifiers: dict[str, Any] = {}
    for side, language in (("source_lang", source_lang), ("target_lang", target_lang)):
        try:
            identifiers[side] = to_id(language)
        except KeyError:
            identifiers[side] = None
        if identifiers[side] in (None, tokenizer.unk_token_id):
            raise ValueError(f"{side} is {language!r}, which {type(tokenizer).__name__} does not know.")
    tokenizer.src_lang = source_lang
    tokenizer.tgt_lang = target_lang
    return {"forced_bos_token_id": identifiers["target_lang"]}


@dataclass
class InferenceArguments:
    """Command-line arguments of every script that translates: the model, where it runs, and how it searches."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of a sequence-to-sequence model."})
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub. Default: main."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Let code from the checkpoint run."})
    device: str = field(default="auto", metadata={"help": "auto (default: cuda, mps or cpu), or one such as cuda:1."})
    dtype: str = field(default="auto", metadata={"help": "auto (default: as saved), float32, bfloat16 or float16."})
    num_beams: int | None = field(
        default=None, metadata={"help": "Beams; 1 is greedy search. Default: the model's generation config."}
    )
    length_penalty: float | None = field(
        default=None, metadata={"help": "Above 0 favours longer translations. Default: the model's generation config."}
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Limit of a translation, in tokens. Default: the model's generation config."}
    )
    max_source_length: int | None = field(
        default=None,
        metadata={
            "help": "Longer sources are truncated to so many tokens, with a warning. Default: the tokenizer's limit."
        },
    )
    batch_size: int = field(default=32, metadata={"help": "Sentences translated together. Default: 32."})
    source_prefix: str = field(default="", metadata={"help": "Put before each source, for T5 and its like."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language, such as en or eng_Latn."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language, such as de or deu_Latn."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        if (self.source_lang is None) != (self.target_lang is None):
            raise ValueError(
                f"source_lang is {self.source_lang!r} and target_lang is {self.target_lang!r}; give both or neither."
            )

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
        """The model, its tokenizer, and the arguments of `generate` that were given or that the languages ask for."""
        model, tokenizer = load_model_and_tokenizer(
            self.model_name_or_path,
            device=self.device,
            dtype=self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )
        given = {name: getattr(self, name) for name in ("num_beams", "length_penalty", "max_new_tokens")}
        generate_kwargs = {name: value for name, value in given.items() if value is not None}
        if self.source_lang is not None and self.target_lang is not None and is_multilingual(tokenizer):
            generate_kwargs |= set_languages(tokenizer, source_lang=self.source_lang, target_lang=self.target_lang)
        return model, tokenizer, generate_kwargs


@contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every module gets its own training flag back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in flags:
            module.training = training


def length_limit(tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> int | None:
    """How many tokens, special ones included, a text may have: `max_length`, else the tokenizer's own limit, if any.

    Raises:
        ValueError: If `max_length` leaves no room for a token beside the special ones.
    """
    if max_length is None:
        return tokenizer.model_max_length if tokenizer.model_max_length < _NO_LENGTH_LIMIT else None
    least = tokenizer.num_special_tokens_to_add() + 1
    if max_length < least:
        raise ValueError(f"The maximum length is {max_length} tokens; it must be at least {least} with this tokenizer.")
    return max_length


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    limit: int | None,
    line_numbers: Sequence[int],
    side: Literal["source", "target"] = "source",
) -> list[list[int]]:
    """Token ids of each text, special tokens included.

    Args:
        tokenizer: Any tokenizer.
        texts: The texts.
        limit: Longer texts are truncated to this many tokens, each with a warning; `None` for no limit.
        line_numbers: How the warnings call the texts.
        side: `"target"` encodes as `text_target`.
    """
    if not texts:
        return []
    argument = "text" if side == "source" else "text_target"
    # verbose=False: the tokenizer's own remark about overlong texts names no line and comes once.
    token_ids: list[list[int]] = tokenizer(**{argument: list(texts)}, verbose=False)["input_ids"]
    for index, ids in enumerate(token_ids):
        if limit is not None and len(ids) > limit:
            logger.warning("%s line %d: truncated to %d of its %d tokens", side, line_numbers[index], limit, len(ids))
            token_ids[index] = tokenizer(**{argument: texts[index]}, truncation=True, max_length=limit)["input_ids"]
    return token_ids


def progress_bar(progress: bool | str, *, total: int | None, unit: str = "sentence") -> Any:
    """A bar on stderr; `False` shows none, a string is its description. Obeys transformers' `disable_progress_bar`."""
    description = progress if isinstance(progress, str) else None
    return tqdm(total=total, desc=description, unit=unit, disable=progress is False)


@dataclass(frozen=True)
class _Translator:
    """What stays the same from one window of sentences to the next."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    max_source_length: int | None
    source_prefix: str
    generate_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1 sentence.")
        length_limit(self.tokenizer, self.max_source_length)

    def translate_window(
        self, sentences: Sequence[str], *, first_line: int, num_return_sequences: int, bar: Any
    ) -> list[list[str]]:
        """The translations of each sentence, best first; `bar` moves on by one per sentence."""
        translations = [[""] * num_return_sequences for _ in sentences]
        filled = [index for index, sentence in enumerate(sentences) if sentence.strip()]
        bar.update(len(sentences) - len(filled))
        token_ids = encode_texts(
            self.tokenizer,
            [self.source_prefix + sentences[index] for index in filled],
            limit=length_limit(self.tokenizer, self.max_source_length),
            line_numbers=[first_line + index for index in filled],
        )
        longest_first = sorted(range(len(filled)), key=lambda position: len(token_ids[position]), reverse=True)
        with inference(self.model):
            for start in range(0, len(filled), self.batch_size):
                batch = longest_first[start : start + self.batch_size]
                texts = self._translate_batch([token_ids[position] for position in batch], num_return_sequences)
                for position, row in zip(batch, range(0, len(texts), num_return_sequences), strict=True):
                    translations[filled[position]] = texts[row : row + num_return_sequences]
                bar.update(len(batch))
        return translations

    def _translate_batch(self, token_ids: list[list[int]], num_return_sequences: int) -> list[str]:
        inputs = self.tokenizer.pad({"input_ids": token_ids}, return_attention_mask=True, return_tensors="pt")
        own = {"num_return_sequences": num_return_sequences, "return_dict_in_generate": False}
        generate: Any = self.model.generate
        sequences = generate(**inputs.to(self.model.device), **{**self.generate_kwargs, **own})
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def translate_n_best(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    num_return_sequences: int,
    batch_size: int = 32,
    max_source_length: int | None = None,
    source_prefix: str = "",
    progress: bool | str = True,
    **generate_kwargs: Any,
) -> list[list[str]]:
    """Translates sentences, giving several translations of each.

    Args:
        model: See [`translate`].
        tokenizer: See [`translate`].
        sentences: See [`translate`].
        num_return_sequences: Translations per sentence; needs as many beams, or sampling.
        batch_size: See [`translate`].
        max_source_length: See [`translate`].
        source_prefix: See [`translate`].
        progress: See [`translate`].
        **generate_kwargs: See [`translate`].

    Returns:
        For each sentence, in order, `num_return_sequences` translations, best first (empty ones for an empty sentence).

    Raises:
        TypeError: If `sentences` is a single string.
        ValueError: If `batch_size` or `max_source_length` is too small.
    """
    if isinstance(sentences, str):
        raise TypeError("sentences is one string; pass a list of them.")
    translator = _Translator(model, tokenizer, batch_size, max_source_length, source_prefix, generate_kwargs)
    with progress_bar(progress, total=len(sentences)) as bar:
        return translator.translate_window(sentences, first_line=1, num_return_sequences=num_return_sequences, bar=bar)


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    batch_size: int = 32,
    max_source_length: int | None = None,
    source_prefix: str = "",
    progress: bool | str = True,
    **generate_kwargs: Any,
) -> list[str]:
    """Translates sentences, one translation for each (see [`translate_n_best`] for more).

    Args:
        model: Any sequence-to-sequence model; the inputs are moved to its device.
        tokenizer: Its tokenizer.
        sentences: The source sentences. One without text gives an empty translation.
        batch_size: Sentences per call of `generate`.
        max_source_length: Tokens, special ones included; longer sources are truncated with a warning that names the
            line, counted from 1. `None`: the tokenizer's `model_max_length`.
        source_prefix: Put before each source, for models such as T5 (`"translate English to German: "`).
        progress: Whether to show a bar on stderr; a string is its description.
        **generate_kwargs: Passed on to `model.generate`; what is not given comes from the model's generation config.

    Returns:
        The translations, in the order of `sentences`, without special tokens.

    Raises:
        TypeError: If `sentences` is a single string.
        ValueError: If `batch_size` or `max_source_length` is too small, or `num_return_sequences` is not 1.
    """
    num_return_sequences = generate_kwargs.pop("num_return_sequences", 1)
    if num_return_sequences != 1:
        raise ValueError(
            f"num_return_sequences is {num_return_sequences}; translate returns one translation per sentence, "
            "translate_n_best returns more."
        )
    n_best = translate_n_best(
        model,
        tokenizer,
        sentences,
        num_return_sequences=1,
        batch_size=batch_size,
        max_source_length=max_source_length,
        source_prefix=source_prefix,
        progress=progress,
        **generate_kwargs,
    )
    return [best for (best,) in n_best]


def one_line(text: str) -> str:
    """`text` with each line break (line feed, carriage return) turned into a space, so that it fills one line."""
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")


def translate_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    window_size: int = 4096,
    first_line: int = 1,
    total: int | None = None,
    batch_size: int = 32,
    max_source_length: int | None = None,
    source_prefix: str = "",
    progress: bool | str = True,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Translates a stream of lines that need not fit in memory: one output line per input line, in order.

    Args:
        model: See [`translate`].
        tokenizer: See [`translate`].
        lines: Source lines, such as an open text file; a line break at the end is ignored.
        window_size: Lines that are read, sorted and translated together; the outputs of a window appear at once. With
            1, every line is answered before the next one is read.
        first_line: Number of the first line, for warnings and the bar.
        total: Number of the last line, where known, for the bar.
        batch_size: See [`translate`].
        max_source_length: See [`translate`].
        source_prefix: See [`translate`].
        progress: See [`translate`].
        **generate_kwargs: See [`translate`].

    Yields:
        Translations without line breaks: should the model write one, it becomes a space.

    Raises:
        ValueError: If `window_size`, `batch_size` or `max_source_length` is too small.
    """
    if window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1 line.")
    translator = _Translator(model, tokenizer, batch_size, max_source_length, source_prefix, generate_kwargs)
    remaining = iter(lines)
    with progress_bar(progress, total=total, unit="line") as bar:
        bar.update(first_line - 1)
        while window := [line.rstrip("\r\n") for line in islice(remaining, window_size)]:
            # Evaluation mode and inference mode end before the yield: the consumer's code is not ours to change.
            translations = translator.translate_window(window, first_line=first_line, num_return_sequences=1, bar=bar)
            yield from (one_line(best) for (best,) in translations)
            first_line += len(window)


def translate_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_file: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    window_size: int = 4096,
    batch_size: int = 32,
    max_source_length: int | None = None,
    source_prefix: str = "",
    progress: bool | str = True,
    **generate_kwargs: Any,
) -> int:
    """Translates a text file line by line into another; an interrupted run is taken up where it stopped.

    Translations go to `<output_file>.partial`, which becomes `output_file` when complete, so a file with that name is
    always whole. If a partial file is there, its complete lines are kept and translation goes on behind them; what they
    were made with (input, model, vocabulary, options) is kept in `<output_file>.partial.json` and must be the same.

    Args:
        model: See [`translate`].
        tokenizer: See [`translate`].
        input_file: UTF-8 text, one source per line; `.gz` is decompressed.
        output_file: Where the translations go, as UTF-8 text.
        overwrite: Replace an existing `output_file`, and start anew instead of resuming.
        window_size: See [`translate_lines`]; also how many translations an interruption can cost.
        batch_size: See [`translate`].
        max_source_length: See [`translate`].
        source_prefix: See [`translate`].
        progress: See [`translate`].
        **generate_kwargs: See [`translate`].

    Returns:
        The number of lines in `output_file`.

    Raises:
        FileExistsError: If `output_file` exists and `overwrite` is not set, or a partial file is of other settings.
        ValueError: If `output_file` ends in `.gz` or is the input file, or an option is illegal.
    """
    source, target = Path(input_file), Path(output_file)
    _check_target(source, target, overwrite=overwrite)
    options = {"max_source_length": max_source_length, "source_prefix": source_prefix, **generate_kwargs}
    partial = target.with_name(target.name + ".partial")
    state = target.with_name(target.name + ".partial.json")
    if overwrite:
        partial.unlink(missing_ok=True)
    done = _resume(partial, state, settings=_settings(model, tokenizer, source, options))
    with open_text(source) as lines:
        total = sum(1 for _ in lines)
    with open_text(source) as lines, open(partial, "a", encoding="utf-8", newline="\n") as output:
        translations = translate_lines(
            model,
            tokenizer,
            islice(lines, done, None),
            window_size=window_size,
            first_line=done + 1,
            total=total,
            batch_size=batch_size,
            progress=progress,
            **options,
        )
        for number, translation in enumerate(translations, start=1):
            output.write(translation + "\n")
            if number % window_size == 0:
                output.flush()
        output.flush()
        os.fsync(output.fileno())
    os.replace(partial, target)
    state.unlink()
    return total


def _check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    if target.suffix == ".gz":
        raise ValueError(f"{target}: the output is written as plain text; leave out .gz.")
    if not target.exists():
        return
    if target.samefile(source):
        raise ValueError(f"{target}: the output file is the input file.")
    if not overwrite:
        raise FileExistsError(f"{target} exists; choose another name or allow overwriting it (overwrite).")


def _resume(partial: Path, state: Path, *, settings: dict[str, Any]) -> int:
    """How many lines of `partial` are done; a line that an interrupted run wrote half is cut off."""
    if not partial.exists():
        state.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return 0
    found = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    changed = sorted(name for name in settings.keys() | found.keys() if settings.get(name) != found.get(name))
    if changed:
        raise FileExistsError(
            f"{partial} was begun with other settings ({', '.join(changed)}); delete it or allow overwriting it "
            "(overwrite)."
        )
    done = size = 0
    with open(partial, "r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                done += 1
                size += len(line)
        file.truncate(size)
    logger.info("%s: %d lines are done, going on at line %d", partial, done, done + 1)
    return done


def _settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """What decides the translations of a file; batch and window sizes do not."""
    with open(source, "rb") as file:
        input_digest = hashlib.file_digest(file, "sha256").hexdigest()
    # The head of every tensor tells a model from the same one trained on, and costs less than reading it whole.
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode())
        if not tensor.is_meta:
            weights.update(tensor.flatten()[:256].to("cpu", torch.float32).numpy().tobytes())
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    if getattr(tokenizer, "separate_vocabs", False) and hasattr(tokenizer, "target_tokenizer"):
        vocabulary += json.dumps(sorted(tokenizer.target_tokenizer.get_vocab().items()))
    return {
        "input": input_digest,
        "model": weights.hexdigest(),
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "generation_config": model.generation_config.to_json_string(),
        "options": {name: str(value) for name, value in sorted(options.items())},
    }
