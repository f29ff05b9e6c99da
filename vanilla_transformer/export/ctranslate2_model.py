"""Translates with a model exported to CTranslate2 in place of one of the library's: see `CTranslate2Model`."""

import copy
import hashlib
import importlib.util
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.data.vocabularies import load_needed_tokenizer
from vanilla_transformer.files import digest_files, digest_weights, read_architecture, read_json
from vanilla_transformer.inference.loading import find_own_device, load_model_and_tokenizer, select_device
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import MAX_EXTRA_TOKENS, remove_trainers_defaults
from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL
from vanilla_transformer.model.search_vanilla_transformer import LENGTH_PENALTIES

from .ctranslate2 import CONFIG_FILE, EXPORT_FOLDER, export_ctranslate2, import_ctranslate2

logger = logging.getLogger(__name__)

# With 1, 97.5% of the Multi30k test sentences become the same as in this package (4 beams, the library's length
# penalty); with 1.5, 99.9%, in a tenth more time.
PATIENCE = 1.5
_ALMOST_NONE = 1e-9  # a length penalty by which nothing changes in float32

# What torch computes in, too.
FLOATS = ("float32", "bfloat16", "float16")

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
# Those that forbid tokens: before probabilities are computed, while the library does it afterwards.
_FORBIDDING = ("min_length", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens")
# Values that switch a setting off; so do None, False, 0 and empty lists.
_OFF = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1, "guidance_scale": 1}


def read_exported_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the model's config.json held: an exported folder keeps it beside CTranslate2's file of that name."""
    return cast(dict[str, Any], json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8")))


def is_exported_to_ctranslate2(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a model that `export_ctranslate2` wrote."""
    return all((Path(folder) / name).is_file() for name in ("model.bin", CONFIG_FILE))


def find_export(folder: str | os.PathLike[str], *, dtype: str = "auto") -> tuple[Path, str | None]:
    """The export in a model's folder, and why it cannot take the place of that model; `None` if it can."""
    path = Path(folder) / EXPORT_FOLDER
    if not is_exported_to_ctranslate2(path):
        return path, f"there is no export to CTranslate2 in {folder}"
    exported = read_json(path / "config.json") or {}
    own = digest_weights(folder)
    files = (Path(folder) / "config.json", path / CONFIG_FILE)
    now, then = map(_read_architecture, files)
    if not own or exported.get("weights_sha256") != own or now != then:
        return path, f"{path} is not of the weights and config.json that are there now (delete it, and export again)"
    quantization = exported.get("quantization")
    if dtype in FLOATS and quantization not in (None, dtype):
        return path, f"the weights in {path} are {quantization}, not {dtype}"
    return path, None


def _read_architecture(file: Path) -> dict[str, Any]:
    """What a config.json says of the architecture, as it is read: fields that it lacks have their defaults."""
    content = read_json(file)
    return read_architecture(VanillaTransformerConfig.from_dict(content).to_dict()) if content else {}


def find_reason_against(device: str, dtype: str) -> str | None:
    """Why CTranslate2 cannot compute where, and in what, torch would; `None` if it can. Arguments as for torch."""
    if importlib.util.find_spec("ctranslate2") is None:
        return 'ctranslate2 is not installed (pip install "vanilla-transformer[export]")'
    place = select_device(device).type
    num_devices = import_ctranslate2().get_cuda_device_count()
    if place not in ("cpu", "cuda") or (place == "cuda" and not num_devices):
        return f"CTranslate2 cannot use {place} here"
    place = "cuda" if device == "auto" and num_devices else place
    if dtype != "auto" and dtype not in import_ctranslate2().get_supported_compute_types(place):
        return f"CTranslate2 cannot compute in {dtype} here"
    return None


class _Search:
    """The settings of one call of `generate`."""

    def __init__(self, chosen: GenerationConfig) -> None:
        end, forced, pad = chosen.eos_token_id, chosen.forced_eos_token_id, chosen.pad_token_id
        self.end_ids = end if isinstance(end, list) else [] if end is None else [end]
        self.forced_end_id = forced[0] if isinstance(forced, list) else forced
        self.start_id = chosen.decoder_start_token_id
        self.pad_id = pad if pad is not None else self.end_ids[0] if self.end_ids else 0
        self.num_beams = chosen.num_beams or 1
        self.num_wanted = chosen.num_return_sequences or 1
        self.length_penalty = 1.0 if chosen.length_penalty is None else float(chosen.length_penalty)
        self.penalize = LENGTH_PENALTIES[getattr(chosen, "length_penalty_type", None) or "transformers"]
        self.early_stopping = chosen.early_stopping is True
        self.limit = _find_limit(chosen)  # None: as many as the source has, and 50 more
        least = (chosen.min_length or 0) - 1 if chosen.min_new_tokens is None else chosen.min_new_tokens
        self.min_new_tokens = max(least, 0)
        # As in the library, the end symbol alone is not forbidden among words.
        words = [ids for ids in chosen.bad_words_ids or [] if not (len(ids) == 1 and ids[0] in self.end_ids)]
        self.suppressed = [*words, *([token_id] for token_id in chosen.suppress_tokens or [])]
        self.no_repeat_ngram_size = chosen.no_repeat_ngram_size or 0


_Found = tuple[list[int], float]  # a translation's ids, the end symbol included where it has come, and its score


class CTranslate2Model(nn.Module):
    """A model exported to CTranslate2, to use where this package's functions take a model of the library.

    It is a module of torch without parameters; all computation is CTranslate2's. Translations are those of the model
    that was exported, but for rounding and these differences:

    - Beam search ends when `patience * num_beams` translations of a sentence have ended, while this package's goes on
      until no open one can win. With `early_stopping=True` both end alike, but with `"gnmt"` may keep others.
    - One limit of length holds for a batch. Where nothing sets it, longer translations are cut at the limit of their
      own sentence (its length + 50). Greedy search finds the same in this way; beam search might find others.
    - Forbidden tokens (`min_new_tokens`, `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`) are left out
      before probabilities are computed. In beam search the library must be told so: `renormalize_logits=True`.
    - To `no_repeat_ngram_size` the start symbol is no part of the translation.
    - A source of special tokens only gives an empty translation, without asking the model.

    Args:
        folder: What `export_ctranslate2` wrote.
        device: `"cpu"`, `"cuda"` or one such as `"cuda:1"`; `"auto"`: CUDA if CTranslate2 can use it, else the CPU.
        compute_type: What CTranslate2 computes in, such as `"float32"`, `"int8"` or `"float16"`, whatever the weights
            were saved in; `"default"`: as saved, where the device can.
        intra_threads, inter_threads: Threads that work on a batch together, and batches at a time. `None`, on a CPU: as
            many batches as torch has threads, of a thread each; for a large model that gets one sentence at a time,
            `inter_threads=1` has all threads work on it.
        max_batch_size: The most sentences of a batch: larger ones are divided. 0: never. `None`: on a CPU, they are
            divided evenly among the batches at a time.
        patience: How long beam search goes on, at least 1: see above.

    Raises:
        FileNotFoundError: If the folder holds no such model.
        ValueError: If CTranslate2 cannot load the model so, or the patience is below 1.
    """

    digest: torch.Tensor
    # What the library's pipelines tell of a model.
    input_modalities = output_modalities = ("text",)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "auto",
        compute_type: str = "default",
        intra_threads: int | None = None,
        inter_threads: int | None = None,
        max_batch_size: int | None = None,
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
                "one: vanilla-transformer export --format ctranslate2 --model_name_or_path ... --output_dir ..."
            )
        name, _, index = device.partition(":")
        if name == "auto":
            index = str(find_own_device(import_ctranslate2().get_cuda_device_count()))
        threads = torch.get_num_threads()
        is_on_cuda = name == "cuda" or (name == "auto" and import_ctranslate2().get_cuda_device_count() > 0)
        if inter_threads is None:
            inter_threads = 1 if is_on_cuda else max(threads // (intra_threads or 1), 1)
        try:
            self.translator: Any = import_ctranslate2().Translator(
                str(path),
                device=name,
                device_index=int(index or 0),
                compute_type=compute_type,
                intra_threads=max(threads // inter_threads, 1) if intra_threads is None else intra_threads,
                inter_threads=inter_threads,
            )
            self._read_settings(path)
        except Exception as error:  # what a damaged file provokes may be anything
            raise ValueError(f"{path} cannot be loaded on {device}: {type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(threads)  # CTranslate2 gives the thread that calls it as many as its own have
        self.max_batch_size = 0 if is_on_cuda and max_batch_size is None else max_batch_size
        self.patience = patience
        # So that the state tells one model from another, as that of a model with parameters does.
        identity = f"{digest_files([path / 'model.bin'])} {self.dtype} {patience}"
        digest = hashlib.sha256(identity.encode()).digest()
        self.register_buffer("digest", torch.tensor(list(digest), dtype=torch.uint8))

    def _read_settings(self, path: Path) -> None:
        """Reads what is in the folder beside CTranslate2's model."""
        self.config = VanillaTransformerConfig.from_json_file(path / CONFIG_FILE)
        self.generation_config = GenerationConfig.from_pretrained(path)
        remove_trainers_defaults(self.generation_config)
        exported = _read_json(path / "config.json")
        self._start_token: str = exported["decoder_start_token"]
        self.max_positions: int = exported["max_positions"]
        self._num_parameters: int = exported["num_parameters"]
        self._end_token: str = exported["eos_token"]
        shared = path / "shared_vocabulary.json"
        files = [shared if shared.exists() else path / f"{side}_vocabulary.json" for side in ("source", "target")]
        self.source_tokens, self.target_tokens = map(_read_json, files)
        self._target_ids = {token: token_id for token_id, token in enumerate(self.target_tokens)}

    @property
    def device(self) -> torch.device:
        """Where inputs are expected: where CTranslate2 computes, if torch can go there too."""
        name = self.translator.device if torch.cuda.is_available() else "cpu"
        return torch.device(name, self.translator.device_index[0]) if name == "cuda" else torch.device(name)

    @property
    def dtype(self) -> str:
        """What CTranslate2 computes in, such as `"int8_float32"`."""
        return str(self.translator.compute_type)

    def num_parameters(self) -> int:
        """The number of parameters of the model that was exported."""
        return self._num_parameters

    def can_generate(self) -> bool:
        """It can, as a model of the library says it."""
        return True

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: what is exported is a folder already."""
        raise NotImplementedError("A model in CTranslate2 cannot be saved: save the one that it was made of.")

    @torch.inference_mode()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **settings: Any,
    ) -> Any:
        """Generates as `generate` of the library does, by greedy or beam search.

        Sources (B, S) may be padded on either side; without a mask (B, S) pad tokens are padding. `settings` go before
        `generation_config`, and that before `self.generation_config`. Returns the start symbol and the translations,
        (B * num_return_sequences, longest), filled up with padding; with `return_dict_in_generate` an object with those
        as `sequences` and, from beam search, `sequences_scores`.
        """
        chosen, reasons = self._choose(generation_config, settings)
        refuse("CTranslate2 cannot generate as asked", reasons)
        search = _Search(chosen)
        # As in the library, pad tokens are padding unless they end sentences.
        padding = None if search.pad_id in search.end_ids else search.pad_id
        found = self._search(self._read_sources(input_ids, attention_mask, padding), search)
        rows = [torch.tensor([search.start_id, *ids]) for of_sentence in found for ids, _ in of_sentence]
        sequences: Any = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=search.pad_id)
        sequences = sequences.to(input_ids.device)
        if not chosen.return_dict_in_generate:
            return sequences
        if search.num_beams == 1:
            return GenerateEncoderDecoderOutput(sequences=sequences)
        scores: Any = torch.tensor([score for of_sentence in found for _, score in of_sentence])
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores.to(input_ids.device))

    def sum_losses(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> float:
        """Returns the summed negative log-likelihood of labels (B, T), -100 at padding, in nats; sources are (B, S)."""
        sources = self._read_sources(input_ids, attention_mask, pad_id=None)
        targets = [_name_tokens(row[row != IGNORED_LABEL].tolist(), self.target_tokens) for row in labels]
        self._check_lengths(targets, "target")
        # CTranslate2 puts the end symbol behind every target; where it is there already, it may not come twice.
        ended = [bool(target) and target[-1] == self._end_token for target in targets]
        bare = [target[:-1] if ends else target for target, ends in zip(targets, ended, strict=True)]
        limits = {"max_batch_size": self._find_batch_size(len(sources)), "max_input_length": 0}
        scored = self.translator.score_batch(sources, bare, **limits)
        pairs = zip(scored, ended, strict=True)
        return -sum(sum(result.log_probs if ends else result.log_probs[:-1]) for result, ends in pairs)

    def find_refused(self, settings: dict[str, Any]) -> list[str]:
        """Why `generate` would refuse such settings: all reasons, none if it takes them."""
        return self._choose(None, settings)[1]

    def _choose(
        self, generation_config: GenerationConfig | None, settings: dict[str, Any]
    ) -> tuple[GenerationConfig, list[str]]:
        """Puts all settings together, and says which cannot be carried out."""
        chosen = copy.deepcopy(self.generation_config)
        given = {} if generation_config is None else generation_config.to_diff_dict()
        unknown = chosen.update(**{**given, **settings})
        if "length_penalty_type" in unknown:
            chosen.update(length_penalty_type=unknown.pop("length_penalty_type"), allow_custom_entries=True)
        reasons = [f"{name} is none of its settings" for name in unknown]
        reasons += find_refused_settings(chosen, self.max_positions)
        start = chosen.decoder_start_token_id
        if start is not None and _name_tokens([start], self.target_tokens) != [self._start_token]:
            reasons.append(f"decoder_start_token_id is {start}; it was exported with {self._start_token!r}")
        return chosen, reasons

    def _read_sources(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_id: int | None
    ) -> list[list[str]]:
        """The tokens of sources (B, S) without padding."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids) if pad_id is None else input_ids != pad_id
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        sources = [_name_tokens(row[mask].tolist(), self.source_tokens) for row, mask in rows]
        self._check_lengths(sources, "source")
        return sources

    def _check_lengths(self, texts: list[list[str]], side: str) -> None:
        longest = max(map(len, texts), default=0)
        if longest > self.max_positions:
            raise ValueError(
                f"A {side} of {longest} tokens is too long: the exported model has {self.max_positions} positions. "
                "Where they are sinusoids, export it with a larger max_positions."
            )

    def _find_batch_size(self, num_sentences: int) -> int:
        """The most sentences that are computed together; 0: all."""
        if self.max_batch_size is None:
            return -(-num_sentences // self.translator.num_translators)
        return self.max_batch_size

    def _search(self, sources: list[list[str]], search: _Search) -> list[list[_Found]]:
        """The wanted translations of each source, best first."""
        limits = [search.limit or min(len(source) + MAX_EXTRA_TOKENS, self.max_positions) for source in sources]
        longest = max(limits)
        # The last token, where it is given, need not be searched for.
        num_steps = longest if search.forced_end_id is None else max(longest - 1, 1)
        patience = 1.0 if search.early_stopping else self.patience
        results = self.translator.translate_batch(
            sources,
            beam_size=search.num_beams,
            patience=patience,
            num_hypotheses=1 if search.num_beams == 1 else _round(search.num_beams, patience),
            # Without any penalty, CTranslate2 would not stop before the best of all open beams ends.
            length_penalty=search.length_penalty or (_ALMOST_NONE if search.early_stopping else 0.0),
            return_scores=search.num_beams > 1,
            max_input_length=0,
            max_decoding_length=num_steps,
            min_decoding_length=min(search.min_new_tokens, num_steps),
            end_token=_name_tokens(search.end_ids, self.target_tokens),
            return_end_token=True,
            suppress_sequences=[_name_tokens(ids, self.target_tokens) for ids in search.suppressed],
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            max_batch_size=self._find_batch_size(len(sources)),
        )
        pairs = zip(results, limits, strict=True)
        return [self._read_result(result, search, limit)[: search.num_wanted] for result, limit in pairs]

    def _read_result(self, result: Any, search: _Search, limit: int) -> list[_Found]:
        """The translations of a sentence, at most `limit` tokens each, best first by our own length penalty."""
        found = []
        scores = result.scores or [0.0] * len(result.hypotheses)
        for tokens, score in zip(result.hypotheses, scores, strict=True):
            # CTranslate2's penalty is the library's; without it, the score is a log-probability.
            log_probability = score * max(len(tokens), 1) ** search.length_penalty
            ids = [self._target_ids[token] for token in tokens[:limit]]
            is_cut = not ids or ids[-1] not in search.end_ids
            if search.forced_end_id is not None and is_cut and len(ids) >= limit - 1:
                ids = [*ids[: limit - 1], search.forced_end_id]
            penalty = search.penalize(max(len(ids), len(tokens), 1), search.length_penalty)
            found.append((ids, log_probability / penalty))
        return sorted(found, key=lambda one: one[1], reverse=True)


def load_for_ctranslate2(
    model_name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
    found: tuple[Path, str | None] | None = None,
) -> tuple[CTranslate2Model, PreTrainedTokenizerBase]:
    """Loads a model for CTranslate2, and its tokenizer, from a folder that `export_ctranslate2` wrote.

    Of a model of this package, the export in its folder is taken if it has these weights, with what else is in the
    folder now; `found` is what `find_export` returned, where it was asked already. Any other, of a folder or the Hub,
    is converted in passing. `dtype` is `compute_type`.
    """
    import_ctranslate2()
    settings: dict[str, Any] = {"device": device, "compute_type": "default" if dtype == "auto" else dtype}
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if is_exported_to_ctranslate2(model_name_or_path):
        own = load_needed_tokenizer(model_name_or_path, **code)
        return CTranslate2Model(model_name_or_path, **settings), own
    path, reason = found or find_export(model_name_or_path, dtype=dtype)
    if reason is None:
        exported = CTranslate2Model(path, **settings)
        exported.config = VanillaTransformerConfig.from_pretrained(model_name_or_path)
        if Path(model_name_or_path, "generation_config.json").is_file():
            exported.generation_config = GenerationConfig.from_pretrained(model_name_or_path)
            remove_trainers_defaults(exported.generation_config)
        return exported, load_needed_tokenizer(model_name_or_path, **code)
    logger.info(
        "%s is converted for CTranslate2, this time only, since %s. To have it converted once and for all: "
        "vanilla-transformer export --model_name_or_path %s --format ctranslate2%s",
        *(model_name_or_path, reason, model_name_or_path),
        "" if Path(model_name_or_path).is_dir() else " --output_dir ...",
    )
    model, tokenizer = load_model_and_tokenizer(model_name_or_path, device="cpu", revision=revision, **code)
    return convert_to_ctranslate2(model, tokenizer, **settings), tokenizer


def convert_to_ctranslate2(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, device: str = "auto", compute_type: str = "default"
) -> CTranslate2Model:
    """The same model in CTranslate2, without a folder that stays; the last arguments are of `CTranslate2Model`."""
    with tempfile.TemporaryDirectory() as folder:
        export_ctranslate2(model, folder, tokenizer=tokenizer)
        return CTranslate2Model(folder, device=device, compute_type=compute_type)


def _round(num_beams: int, patience: float) -> int:
    """As many translations as CTranslate2 waits for; it computes this in float32."""
    return int(np.float32(num_beams) * np.float32(patience) + np.float32(0.5))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def find_refused_settings(chosen: GenerationConfig, max_positions: int) -> list[str]:
    """Which settings of a search CTranslate2 cannot carry out."""
    on = {name: value for name, value in chosen.to_diff_dict().items() if value and value != _OFF.get(name)}
    foreign = [name for name in on if name not in _UNDERSTOOD | _WITHOUT_EFFECT and not name.startswith("_")]
    reasons = [f"{name} is {on[name]!r}, of which it has no counterpart" for name in foreign]
    penalty_type = getattr(chosen, "length_penalty_type", None)
    if penalty_type not in (None, *LENGTH_PENALTIES):
        reasons.append(f"length_penalty_type is {penalty_type!r} (can be: {', '.join(LENGTH_PENALTIES)})")
    num_beams, num_wanted = chosen.num_beams or 1, chosen.num_return_sequences or 1
    if num_beams > 1 and not chosen.renormalize_logits:
        effect = "which changes other probabilities in its beam search"
        advice = f"{effect} (can be: with num_beams=1, or renormalize_logits=true in generation_config.json)"
        reasons += [f"{name} is {getattr(chosen, name)!r}, {advice}" for name in _FORBIDDING if getattr(chosen, name)]
    if num_wanted > num_beams:
        reasons.append(f"num_return_sequences is {num_wanted}, more than num_beams, {num_beams}")
    limit = _find_limit(chosen)
    if limit is not None and not 1 <= limit <= max_positions:
        reasons.append(f"{limit} new tokens are asked for (can be: 1 to {max_positions}, for so many it has positions)")
    if chosen.decoder_start_token_id is None:
        reasons.append("decoder_start_token_id is None")
    return reasons


def _name_tokens(ids: list[int], tokens: list[str]) -> list[str]:
    if ids and not 0 <= min(ids) <= max(ids) < len(tokens):
        raise ValueError(f"The ids {ids} are not all within a vocabulary of {len(tokens)} tokens.")
    return [tokens[token_id] for token_id in ids]


def _find_limit(chosen: GenerationConfig) -> int | None:
    """The most tokens of a translation without the start symbol, if it is the same for all sentences."""
    if chosen.max_new_tokens is not None:
        return int(chosen.max_new_tokens)
    return None if chosen.max_length is None else int(chosen.max_length) - 1
