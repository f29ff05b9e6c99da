"""Translates with a model exported to CTranslate2 in place of one of the library's: see `CTranslate2Model`."""

import copy
import hashlib
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.data.vocabularies import load_needed_tokenizer
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import MAX_EXTRA_TOKENS
from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL
from vanilla_transformer.model.search_vanilla_transformer import LENGTH_PENALTIES

from .ctranslate2 import CONFIG_FILE, QUANTIZATIONS, export_ctranslate2, import_ctranslate2

logger = logging.getLogger(__name__)

# With 1, 97.5% of the Multi30k test sentences become the same as in this package (4 beams, the library's length
# penalty); with 1.5, 99.9%, in a tenth more time.
PATIENCE = 1.5
_ALMOST_NONE = 1e-9  # a length penalty by which nothing changes in float32

# Settings of `generate` that are carried out here.
_UNDERSTOOD = {
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    *("num_beams", "num_return_sequences", "length_penalty", "length_penalty_type", "early_stopping"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens"),
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "return_dict_in_generate"),
}
# Those that change nothing: of caches, and of sampling, which is refused itself.
_WITHOUT_EFFECT = {
    *("use_cache", "cache_implementation", "cache_config", "disable_compile", "renormalize_logits"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "transformers_version"),
}
# Values that switch a setting off; so do None, False, 0 and empty lists.
_OFF = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1, "guidance_scale": 1}


def read_exported_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the model's config.json held: an exported folder keeps it beside CTranslate2's file of that name."""
    return cast(dict[str, Any], json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8")))


def is_exported_to_ctranslate2(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a model that `export_ctranslate2` wrote."""
    return all((Path(folder) / name).is_file() for name in ("model.bin", CONFIG_FILE))


@dataclass(frozen=True)
class _Search:
    """The settings of one call of `generate`."""

    num_beams: int
    num_wanted: int
    length_penalty: float
    penalize: Callable[[int | torch.Tensor, float], Any]
    early_stopping: bool
    limit: int | None  # of new tokens; None: as many as the source has, and 50 more
    longest: int  # of the batch's limits, at which translations that have not ended are given the forced token
    min_new_tokens: int
    end_ids: list[int]
    forced_end_id: int | None
    suppressed: list[list[int]]
    no_repeat_ngram_size: int
    start_id: int
    pad_id: int

    def find_forced_end(self, limit: int) -> int | None:
        """The token that must end a translation of so many tokens, if any: shorter limits of sentences just cut."""
        return self.forced_end_id if limit == self.longest else None


@dataclass(frozen=True)
class _Found:
    """A translation: its ids, the end symbol included where it has come, and its score."""

    ids: list[int]
    score: float


class CTranslate2Model(nn.Module):
    """A model exported to CTranslate2, to use where this package's functions take a model of the library.

    `translate`, `translate_n_best`, `translate_lines`, `translate_file` and `score_loss` take it. It is a module of
    torch without parameters, so that it has the same methods; all computation is CTranslate2's.

    Translations are the same as those of the model that was exported, but for rounding, where a search can be the same:

    - Greedy search and the limits of length are the same, each sentence's own limit (its length + 50) included.
    - Beam search makes the same steps, with either kind of `length_penalty_type`, but CTranslate2 ends it by another
      rule: when `patience * num_beams` translations of a sentence have ended, where this package compares scores of
      what has ended and what is open. The one may see a better translation that the other does not wait for, and those
      that are not best, in n-best lists, differ more often; a larger `patience` is surer and slower. With
      `early_stopping=True` both end alike, whatever the patience, but with `"gnmt"` may keep others of the translations
      that have ended: CTranslate2 chooses by the library's length penalty.
    - Tokens that `min_new_tokens`, `no_repeat_ngram_size`, `bad_words_ids` and `suppress_tokens` forbid are left out
      before probabilities are computed, as in the library with `renormalize_logits=True`; in a beam's score the
      library counts their share otherwise.
    - To `no_repeat_ngram_size` the start symbol is no part of the translation. In the library it is, which makes a
      difference where that symbol is generated too.
    - A source of special tokens only gives an empty translation, without asking the model.

    Args:
        folder: What `export_ctranslate2` wrote.
        device: `"cpu"`, `"cuda"` or one such as `"cuda:1"`; `"auto"`: CUDA if CTranslate2 can use it, else the CPU.
        compute_type: What CTranslate2 computes in, such as `"float32"`, `"int8"` or `"float16"`, whatever the weights
            were saved in; `"default"`: as saved, where the device can.
        intra_threads: Threads that work on a batch together, on a CPU. `None`: as many as torch has.
        inter_threads: How many batches are worked on at a time; needs `max_batch_size`.
        max_batch_size: Larger batches are divided, sentences of like length together. 0: never.
        patience: How long beam search goes on, at least 1: see above.

    Raises:
        FileNotFoundError: If the folder holds no such model.
        ImportError: If CTranslate2 is not installed.
        ValueError: If there is no such device, it cannot compute in that type, a file is missing or damaged, or the
            patience is below 1.

    Example:
        ```python
        model = CTranslate2Model("out/my-model-int8")
        tokenizer = AutoTokenizer.from_pretrained("out/my-model-int8")
        translate(model, tokenizer, ["A man rides a horse."], num_beams=4)
        ```
    """

    digest: torch.Tensor

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "auto",
        compute_type: str = "default",
        intra_threads: int | None = None,
        inter_threads: int = 1,
        max_batch_size: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1.")
        import_ctranslate2()
        path = Path(folder)
        if not is_exported_to_ctranslate2(path):
            raise FileNotFoundError(
                f"{path} holds no model exported to CTranslate2 by this package (model.bin and {CONFIG_FILE}). Make "
                "one: python scripts/export_model.py --format ctranslate2 --model_name_or_path ... --output_dir ..."
            )
        self._device = find_device(device)
        num_threads = torch.get_num_threads() if intra_threads is None else intra_threads
        self.translator: Any = _open_translator(
            path, self._device, compute_type=compute_type, intra_threads=num_threads, inter_threads=inter_threads
        )
        self.max_batch_size = max_batch_size
        self.patience = patience
        try:
            self._read_settings(path)
        except (KeyError, OSError, TypeError, ValueError, StrictDataclassError) as error:
            reason = f"there is no {error} in its config.json" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} holds no whole model exported to CTranslate2: {reason}") from error
        # So that the state tells one model from another, as that of a model with parameters does.
        with open(path / "model.bin", "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(f"{self.dtype} {patience}".encode())
        self.register_buffer("digest", torch.tensor(list(digest.digest()), dtype=torch.uint8))

    def _read_settings(self, path: Path) -> None:
        """Reads what is in the folder beside CTranslate2's model."""
        self.config = VanillaTransformerConfig.from_json_file(path / CONFIG_FILE)
        self.generation_config = GenerationConfig.from_pretrained(path)
        exported = _read_json(path / "config.json")
        self.max_positions: int = exported["max_positions"]
        self._num_parameters: int = exported["num_parameters"]
        self._end_token: str = exported["eos_token"]
        shared = path / "shared_vocabulary.json"
        self.source_tokens: list[str] = _read_json(shared if shared.exists() else path / "source_vocabulary.json")
        self.target_tokens: list[str] = _read_json(shared if shared.exists() else path / "target_vocabulary.json")
        self._target_ids = {token: token_id for token_id, token in enumerate(self.target_tokens)}

    @property
    def device(self) -> torch.device:
        """Where inputs are expected: where CTranslate2 computes, if torch can go there too."""
        return self._device if self._device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")

    @property
    def dtype(self) -> str:
        """What CTranslate2 computes in, such as `"int8_float32"`."""
        return str(self.translator.compute_type)

    def num_parameters(self) -> int:
        """The number of parameters of the model that was exported."""
        return self._num_parameters

    @torch.inference_mode()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **settings: Any,
    ) -> Any:
        """Generates as `generate` of the library does, by greedy or beam search.

        Args:
            input_ids: Sources (B, S), padded on either side.
            attention_mask: (B, S), 1 at tokens and 0 at padding; `None`: pad tokens are padding.
            generation_config: Settings, instead of which those of `self.generation_config` hold where it has none.
            **settings: Settings that go before both.

        Returns:
            The start symbol and the translations, (B * num_return_sequences, longest), filled up with padding; with
            `return_dict_in_generate` an object with those as `sequences` and, from beam search, `sequences_scores`.

        Raises:
            ConversionError: If CTranslate2 has no counterpart of a setting; lists all.
            ValueError: If there is no source, an id is none of the vocabulary's, or a source is longer than the
                position table.
        """
        chosen = self._choose(generation_config, settings)
        search = _make_search(chosen, min(input_ids.shape[1] + MAX_EXTRA_TOKENS, self.max_positions))
        # As in the library, pad tokens are padding unless they end sentences.
        padding = None if search.pad_id in search.end_ids else search.pad_id
        sources = self._read_sources(input_ids, attention_mask, padding)
        found = self._search(sources, search)
        rows = [torch.tensor([search.start_id, *one.ids]) for of_sentence in found for one in of_sentence]
        sequences: Any = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=search.pad_id)
        sequences = sequences.to(input_ids.device)
        if not chosen.return_dict_in_generate:
            return sequences
        if search.num_beams == 1:
            return GenerateEncoderDecoderOutput(sequences=sequences)
        scores: Any = torch.tensor([one.score for of_sentence in found for one in of_sentence])
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores.to(input_ids.device))

    def sum_losses(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> float:
        """Returns the negative log-likelihood of target tokens, summed, in nats.

        Args:
            input_ids: Sources (B, S).
            attention_mask: (B, S), 1 at tokens and 0 at padding.
            labels: Targets (B, T), -100 at padding.

        Raises:
            ValueError: If there is no source, an id is none of the vocabulary's, or a text is longer than the position
                table.
        """
        sources = self._read_sources(input_ids, attention_mask, pad_id=None)
        _check_ids(labels[labels != IGNORED_LABEL], len(self.target_tokens), "target")
        targets = [[self.target_tokens[index] for index in row[row != IGNORED_LABEL].tolist()] for row in labels]
        self._check_lengths(targets, "target")
        # CTranslate2 puts the end symbol behind every target; where it is there already, it may not come twice.
        ended = [bool(target) and target[-1] == self._end_token for target in targets]
        scored = self.translator.score_batch(
            self._name_tokens(sources),
            [target[:-1] if ends else target for target, ends in zip(targets, ended, strict=True)],
            max_batch_size=self.max_batch_size,
            max_input_length=0,
        )
        counted = [
            result.log_probs if ends else result.log_probs[:-1] for result, ends in zip(scored, ended, strict=True)
        ]
        return -sum(itertools.chain.from_iterable(counted))

    def _choose(self, generation_config: GenerationConfig | None, settings: dict[str, Any]) -> GenerationConfig:
        """Puts all settings together, and refuses those that cannot be carried out."""
        chosen = copy.deepcopy(self.generation_config)
        given = {} if generation_config is None else generation_config.to_diff_dict()
        unknown = chosen.update(**{**given, **settings})
        if "length_penalty_type" in unknown:
            chosen.update(length_penalty_type=unknown.pop("length_penalty_type"), allow_custom_entries=True)
        reasons = [f"{name} is none of its settings" for name in unknown]
        reasons += _find_reasons(chosen, self.max_positions)
        reasons += _find_strange_ids(chosen, len(self.target_tokens))
        refuse("CTranslate2 cannot generate as asked", reasons)
        return chosen

    def _read_sources(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_id: int | None
    ) -> list[list[int]]:
        """The ids (B, S) without padding."""
        if not len(input_ids):
            raise ValueError(f"input_ids has the shape {tuple(input_ids.shape)}; there must be a source at least.")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids) if pad_id is None else input_ids != pad_id
        mask = attention_mask.bool()
        _check_ids(input_ids[mask], len(self.source_tokens), "source")
        sources: list[list[int]] = [row[kept].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        self._check_lengths(sources, "source")
        return sources

    def _check_lengths(self, texts: Sequence[Sequence[Any]], side: str) -> None:
        longest = max(map(len, texts), default=0)
        if longest > self.max_positions:
            raise ValueError(
                f"A {side} of {longest} tokens is too long: the exported model has {self.max_positions} positions. "
                "Where they are sinusoids, export it with a larger max_positions."
            )

    def _name_tokens(self, sources: list[list[int]]) -> list[list[str]]:
        return [[self.source_tokens[token_id] for token_id in source] for source in sources]

    def _search(self, sources: list[list[int]], search: _Search) -> list[list[_Found]]:
        """The wanted translations of each source, best first."""
        if search.limit is None:
            limits = [min(len(source) + MAX_EXTRA_TOKENS, self.max_positions) for source in sources]
        else:
            limits = [search.limit] * len(sources)
        found = self._run(sources, search, max(limits, default=1))
        if search.num_beams == 1:
            return [
                [_Found(one.ids[:limit], one.score) for one in of_sentence]
                for of_sentence, limit in zip(found, limits, strict=True)
            ]
        # One limit holds for a whole batch. A sentence that had enough translations before its own limit would have
        # found the same with it; the few others are searched again, with those of the same limit.
        again: dict[int, list[int]] = {}
        for index, (of_sentence, limit) in enumerate(zip(found, limits, strict=True)):
            if limit < max(limits) and max(len(one.ids) for one in of_sentence) >= limit:
                again.setdefault(limit, []).append(index)
        for limit, indices in again.items():
            repeated = self._run([sources[index] for index in indices], search, limit)
            for index, of_sentence in zip(indices, repeated, strict=True):
                found[index] = of_sentence
        return [of_sentence[: search.num_wanted] for of_sentence in found]

    def _run(self, sources: list[list[int]], search: _Search, limit: int) -> list[list[_Found]]:
        """All translations that end with a search of at most `limit` tokens, best first."""
        # The last token, where it is given, need not be searched for.
        num_steps = limit if search.find_forced_end(limit) is None else max(limit - 1, 1)
        patience = 1.0 if search.early_stopping else self.patience
        results = self.translator.translate_batch(
            self._name_tokens(sources),
            beam_size=search.num_beams,
            patience=patience,
            num_hypotheses=1 if search.num_beams == 1 else _round(search.num_beams, patience),
            # Without any penalty, CTranslate2 would not stop before the best of all open beams ends.
            length_penalty=search.length_penalty or (_ALMOST_NONE if search.early_stopping else 0.0),
            return_scores=search.num_beams > 1,
            max_input_length=0,
            max_decoding_length=num_steps,
            min_decoding_length=min(search.min_new_tokens, num_steps),
            end_token=[self.target_tokens[token_id] for token_id in search.end_ids],
            return_end_token=True,
            suppress_sequences=[[self.target_tokens[token_id] for token_id in ids] for ids in search.suppressed],
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            max_batch_size=self.max_batch_size,
        )
        return [self._read_result(result, search, limit) for result in results]

    def _read_result(self, result: Any, search: _Search, limit: int) -> list[_Found]:
        """The translations of a sentence, best first by our own length penalty."""
        found = []
        scores = result.scores or [0.0] * len(result.hypotheses)
        for tokens, score in zip(result.hypotheses, scores, strict=True):
            ids = [self._target_ids[token] for token in tokens]
            # CTranslate2's penalty is the library's; without it, the score is a log-probability.
            log_probability = score * max(len(ids), 1) ** search.length_penalty
            is_cut = not ids or ids[-1] not in search.end_ids
            forced_end_id = search.find_forced_end(limit)
            if forced_end_id is not None and is_cut and len(ids) >= limit - 1:
                ids = [*ids[: limit - 1], forced_end_id]
            penalty = search.penalize(max(len(ids), 1), search.length_penalty)
            found.append(_Found(ids, log_probability / penalty))
        return sorted(found, key=lambda one: one.score, reverse=True)


def load_for_ctranslate2(
    model_name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
) -> tuple[CTranslate2Model, PreTrainedTokenizerBase]:
    """Loads a model for CTranslate2, and its tokenizer.

    Args:
        model_name_or_path: A folder that `export_ctranslate2` wrote; or a folder or Hub name of a model of this
            package, which is then converted into a folder that lasts no longer than this takes.
        device: As `CTranslate2Model` takes it.
        dtype: What to compute in, one of `QUANTIZATIONS`; `"auto"`: as saved, where the device can.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code from the checkpoint may run.

    Raises:
        ConversionError: If CTranslate2 cannot compute the model; lists all reasons.
        ImportError: If CTranslate2 is not installed.
        OSError: If there is no such model.
        ValueError: If there is no such device, it cannot compute in that type, an exported model is damaged, or there
            is no tokenizer.
    """
    import_ctranslate2()
    if dtype not in ("auto", *QUANTIZATIONS):
        raise ValueError(f"dtype is {dtype!r}; for CTranslate2 it must be one of {['auto', *QUANTIZATIONS]}.")
    settings: dict[str, Any] = {"device": device, "compute_type": "default" if dtype == "auto" else dtype}
    if is_exported_to_ctranslate2(model_name_or_path):
        own = load_needed_tokenizer(model_name_or_path, trust_remote_code=trust_remote_code)
        return CTranslate2Model(model_name_or_path, **settings), own
    logger.info(
        "%s is converted for CTranslate2, this time only. To have it converted once and for all: "
        "python scripts/export_model.py --model_name_or_path %s --format ctranslate2 --output_dir ...",
        *(model_name_or_path, model_name_or_path),
    )
    model, tokenizer = load_model_and_tokenizer(
        model_name_or_path, device="cpu", revision=revision, trust_remote_code=trust_remote_code
    )
    with tempfile.TemporaryDirectory() as folder:
        export_ctranslate2(cast(Any, model), folder, tokenizer=tokenizer)
        return CTranslate2Model(folder, **settings), tokenizer


def find_device(name: str) -> torch.device:
    """The device called `name`; `"auto"` is CUDA where CTranslate2 can use it, else the CPU.

    Raises:
        ValueError: If CTranslate2 does not know such devices, or there is none here.
    """
    num_gpus: int = import_ctranslate2().get_cuda_device_count()
    if name == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # what torch says names all devices that anybody has thought of
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; CTranslate2 computes on cpu and cuda.")
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ValueError(f"device is {name!r}; the GPUs that CTranslate2 can use here are {num_gpus} in number.")
    return device


def _open_translator(path: Path, device: torch.device, **settings: Any) -> Any:
    """CTranslate2's `Translator`, whose own errors do not say of which folder they speak."""
    try:
        return import_ctranslate2().Translator(
            str(path), device=device.type, device_index=device.index or 0, **settings
        )
    except Exception as error:  # what a damaged file provokes may be anything
        raise ValueError(f"CTranslate2 cannot load {path} on {device}: {error}") from error


def _round(num_beams: int, patience: float) -> int:
    """As many translations as CTranslate2 waits for; it computes this in float32."""
    return int(np.float32(num_beams) * np.float32(patience) + np.float32(0.5))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _find_reasons(chosen: GenerationConfig, max_positions: int) -> list[str]:
    """Which settings cannot be carried out."""
    reasons = [
        f"{name} is {value!r}, of which it has no counterpart"
        for name, value in chosen.to_diff_dict().items()
        if name not in _UNDERSTOOD | _WITHOUT_EFFECT and not name.startswith("_") and value and value != _OFF.get(name)
    ]
    penalty_type = getattr(chosen, "length_penalty_type", None)
    if penalty_type not in (None, *LENGTH_PENALTIES):
        reasons.append(f"length_penalty_type is {penalty_type!r} (can be: {', '.join(LENGTH_PENALTIES)})")
    num_beams, num_wanted = chosen.num_beams or 1, chosen.num_return_sequences or 1
    if num_wanted > num_beams:
        reasons.append(f"num_return_sequences is {num_wanted}, more than num_beams, {num_beams}")
    limit = _find_limit(chosen)
    if limit is not None and not 1 <= limit <= max_positions:
        reasons.append(f"{limit} new tokens are asked for (can be: 1 to {max_positions}, for so many it has positions)")
    if chosen.decoder_start_token_id is None:
        reasons.append("decoder_start_token_id is None")
    return reasons


def _find_strange_ids(chosen: GenerationConfig, vocab_size: int) -> list[str]:
    """Which settings name tokens that the target's vocabulary has not."""
    names = ("decoder_start_token_id", "eos_token_id", "forced_eos_token_id", "suppress_tokens", "bad_words_ids")
    reasons = []
    for name in names:
        value = getattr(chosen, name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        tokens = itertools.chain.from_iterable(item if isinstance(item, list) else [item] for item in listed)
        strange = [token_id for token_id in tokens if not 0 <= token_id < vocab_size]
        reasons += [f"{name} has the id {token_id} (can be: 0 to {vocab_size - 1})" for token_id in strange[:1]]
    return reasons


def _check_ids(ids: torch.Tensor, vocab_size: int, side: str) -> None:
    """Makes sure that ids (any shape) are tokens: as an index of a list, a negative one counts from the end."""
    strange = ids[(ids < 0) | (ids >= vocab_size)]
    if len(strange):
        raise ValueError(f"A {side} has the id {int(strange[0])}, where the vocabulary has 0 to {vocab_size - 1}.")


def _find_limit(chosen: GenerationConfig) -> int | None:
    """The most tokens of a translation without the start symbol, if it is the same for all sentences."""
    if chosen.max_new_tokens is not None:
        return int(chosen.max_new_tokens)
    return None if chosen.max_length is None else int(chosen.max_length) - 1


def _make_search(chosen: GenerationConfig, longest: int) -> _Search:
    """Reads the settings; `longest` is the batch's limit of new tokens where they set none."""
    end = chosen.eos_token_id
    end_ids = end if isinstance(end, list) else [] if end is None else [end]
    forced = chosen.forced_eos_token_id
    limit = _find_limit(chosen)
    pad = chosen.pad_token_id
    min_length = (chosen.min_length or 0) - 1 if chosen.min_new_tokens is None else chosen.min_new_tokens
    return _Search(
        num_beams=chosen.num_beams or 1,
        num_wanted=chosen.num_return_sequences or 1,
        length_penalty=1.0 if chosen.length_penalty is None else float(chosen.length_penalty),
        penalize=LENGTH_PENALTIES[getattr(chosen, "length_penalty_type", None) or "transformers"],
        early_stopping=chosen.early_stopping is True,
        limit=limit,
        longest=longest if limit is None else limit,
        min_new_tokens=max(min_length, 0),
        end_ids=end_ids,
        forced_end_id=forced[0] if isinstance(forced, list) else forced,
        suppressed=[*(chosen.bad_words_ids or []), *([token_id] for token_id in chosen.suppress_tokens or [])],
        no_repeat_ngram_size=chosen.no_repeat_ngram_size or 0,
        start_id=chosen.decoder_start_token_id,
        pad_id=pad if pad is not None else end_ids[0] if end_ids else 0,
    )
