"""The text-to-text pipelines of transformers 4 for transformers 5, which removed them.

They serve every encoder-decoder text model of the library (Marian, M2M100, NLLB, mBART, T5, BART, ...), with
transformers 4's inputs, outputs and arguments. The file needs nothing but torch and transformers, so that any
checkpoint can carry it: with `trust_remote_code=True`, `pipeline()` then works where this package is not installed.
"""

import copy
import enum
import importlib
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset
from transformers import BatchEncoding, GenerationConfig, Pipeline, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.pipelines.base import pad_collate_fn
from transformers.pipelines.pt_utils import PipelineIterator
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

logger = logging.get_logger(__name__)

_UNLIMITED = int(1e20)  # anything beyond it is no limit to the library; tokenizers without one say 1e30
LIBRARY_MAX_LENGTH = 20  # the tokens that generate() makes when nothing sets a limit
# generate() takes these limits by either name; where both are set, wherever they come from, the second one wins.
_LIMITS = (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens"))
# What a call may hold beside arguments of generate() and of the base class.
_OWN_ARGUMENTS = frozenset({"max_batch_tokens", "return_scores", "stop_sequence"})
WINDOW_SIZE = 4096  # texts that are read ahead, so that those of like length can be put together
_READ_AT_ONCE = 256
_LEAST_TOKENS = 16  # a shorter source counts as so many: its translation has to be searched for nevertheless

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_by_length(
    function: Callable[[list[Item]], Sequence[Result]],
    read: Callable[[int], Sequence[tuple[int, Item]]],
    *,
    fits: Callable[[int], int],
    window_size: int | None = WINDOW_SIZE,
) -> Iterator[Result]:
    """Applies a function to batches of items of like length, and gives the results in the order of the items.

    `read` returns the next items with their lengths: as many as it is told, or fewer at the end. `fits` says how many
    items a batch may have whose longest one has this length. Items of length 0 come in batches of their own. At most
    `window_size` items are held, and the batch with the oldest item comes first; with None, all and the longest batch.
    """
    waiting: list[tuple[int, int, Item]] = []  # shortest first; the numbers are negative, so that older ones come last
    results: dict[int, Result] = {}
    num_read = num_sorted = num_taken = 0
    is_end = False
    while True:
        while not is_end and (window_size is None or num_read - num_taken < window_size):
            wanted = _READ_AT_ONCE if window_size is None else min(_READ_AT_ONCE, window_size - num_read + num_taken)
            items = read(wanted)
            is_end = len(items) < wanted
            waiting += [(length, -number, item) for number, (length, item) in enumerate(items, start=num_read)]
            num_read += len(items)
        if not waiting:
            return
        if num_sorted < num_read:
            waiting.sort(key=itemgetter(0, 1))
            num_sorted = num_read
        batch = _find_batch(waiting, fits, oldest=None if window_size is None else num_taken)
        entries = waiting[batch][::-1]
        del waiting[batch]
        found = function([item for _, _, item in entries])
        results |= {-number: result for (_, number, _), result in zip(entries, found, strict=True)}
        while num_taken in results:
            yield results.pop(num_taken)
            num_taken += 1


def _find_batch(waiting: list[tuple[int, int, Any]], fits: Callable[[int], int], oldest: int | None) -> slice:
    """Where in the sorted list the batch is that holds the oldest item, or the batch of the longest items."""
    first_filled = bisect_left(waiting, 1, key=itemgetter(0))
    position = 0
    if oldest is not None:
        position = next(index for index, entry in enumerate(waiting) if entry[1] == -oldest)
    end = len(waiting)
    while end > first_filled:
        start = max(end - fits(waiting[end - 1][0]), first_filled)
        if oldest is None or start <= position:
            return slice(start, end)
        end = start
    return slice(0, end)


def count_sentences(
    longest: int, *, batch_size: int | None = None, max_batch_tokens: int | None = None, rows: int = 1
) -> int:
    """How many sentences a batch may have: at least one; `max_batch_tokens` limits sentences * rows * longest."""
    limits = [] if batch_size is None else [batch_size]
    if max_batch_tokens is not None:
        limits.append(max_batch_tokens // (rows * max(longest, _LEAST_TOKENS)))
    return max(min(limits, default=1), 1)


class ReturnType(enum.Enum):
    """What a pipeline returns for each generated sequence."""

    TENSORS = 0
    TEXT = 1


def parse_language_pair(task: str) -> tuple[str, str] | None:
    """Reads the languages out of a task's name: `("en", "de")` from `"translation_en_to_de"`, None from others."""
    match = re.fullmatch(r"translation_([^_]+)_to_([^_]+)", task)
    return (match[1], match[2]) if match else None


def is_vanilla(model: PreTrainedModel) -> bool:
    """Whether it is this package's model, in this package or as code of the checkpoint."""
    return model.config.model_type == "vanilla_transformer"


def find_directions(config: Any, source: str | None = None, target: str | None = None) -> dict[tuple[str, str], str]:
    """The prefix of sources, by pair of languages: those of `langs`, else of T5's kind of tasks; or the pairs asked."""
    entries = {task: entry or {} for task, entry in (getattr(config, "task_specific_params", None) or {}).items()}
    matches = [match for task in entries if (match := re.fullmatch("translation_(.+?)_to_(.+)", task))]
    found = {(match[1], match[2]): entries[match[0]].get("prefix") or "" for match in matches}
    if len(langs := tuple(getattr(config, "langs", None) or ())) == 2:  # XLM has more
        found = {langs: found.get(langs) or entries.get("translation", {}).get("prefix") or ""}
    return {pair: found[pair] for pair in found if source in (None, pair[0]) and target in (None, pair[1])}


def check_languages(model: PreTrainedModel, source_lang: str | None, target_lang: str | None) -> bool:
    """Whether a model of this package says its languages; refuses others (None: not given)."""
    known = list(find_directions(model.config)) if is_vanilla(model) else []
    if known and not find_directions(model.config, source_lang, target_lang):
        own, place = ", ".join(map(" to ".join, known)), "langs" if model.config.langs else "task_specific_params"
        asked = f"{source_lang or known[0][0]} to {target_lang or known[0][1]}"
        raise ValueError(f"The model translates {own} ({place} in its config.json), not {asked}.")
    return bool(known)


def is_language_token(tokenizer: Any, token_id: int | None) -> bool:
    """Whether a multilingual tokenizer's token stands for a language, and is no piece of words and no unknown one."""
    # M2M100 finds its languages by their names, and no others.
    is_known = hasattr(tokenizer, "get_lang_id") or token_id in tokenizer.all_special_ids
    return is_known and token_id not in (None, tokenizer.unk_token_id)


def find_position_limit(config: Any) -> int | None:
    """How many positions the encoder's table has, by a configuration that says so."""
    config = getattr(config, "encoder", config)  # composite models have one for each stack
    limits = [getattr(config, f"max_{name}position_embeddings", None) for name in ("encoder_", "")]
    is_learned = getattr(config, "position_embedding_type", None) == "learned"
    offset = getattr(config, "position_offset", 0) if is_learned else 0
    return next((limit - offset for limit in limits if isinstance(limit, int) and limit > 0), None)


def sequence_score_settings(model: PreTrainedModel) -> dict[str, bool]:
    """Arguments that make `generate()` return beam search's scores; other models must keep all scores for that."""
    return {"return_dict_in_generate": True, **({} if is_vanilla(model) else {"output_scores": True})}


def _override(settings: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """Puts settings above others, whose limits they switch off (None) under either name."""
    given = {name for name, value in by.items() if value is not None}
    off = {name: None for pair in _LIMITS if not given.isdisjoint(pair) for name in pair}
    return {**settings, **off, **by}


def _task_specific_params(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    return getattr(model.config, "task_specific_params", None) or {}


class _TextStream(IterableDataset[str]):
    """Texts that come one by one: older base classes gather all that is no dataset into a list."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[str]:
        return self.texts


class _ModelOutputs:
    """What the model makes of encoded texts, in their order, computed in batches of texts of like length."""

    def __init__(self, encoded: Any, run: Callable[[list[Any]], list[Any]], fits: Callable[[int], int]) -> None:
        self.encoded, self.run, self.fits = encoded, run, fits

    def __iter__(self) -> Iterator[Any]:
        remaining = iter(self.encoded)

        def read(count: int) -> list[tuple[int, Any]]:
            return [(inputs["input_ids"].shape[-1], inputs) for inputs in islice(remaining, count)]

        return map_by_length(self.run, read, fits=self.fits)

    def __len__(self) -> int:
        return len(self.encoded)


class _StopSequences(StoppingCriteria):
    """The library's `stop_strings`, which fails for tokenizers without Latin letters or with whole words."""

    def __init__(self, tokenizer: Any, stop_sequences: list[str]) -> None:
        self.tokenizer, self.stop_sequences = tokenizer, stop_sequences

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Says which sequences (batch, target_length) are done."""
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        done = [any(stop in text for stop in self.stop_sequences) for text in texts]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]  # a BoolTensor is a Tensor


class Text2TextGenerationPipeline(Pipeline):
    """Generates text from text with any encoder-decoder model (task `"text2text-generation"`).

    Generation settings come from the call, the constructor, the model's `config.task_specific_params[task]`, the
    model's generation config, and then `max_new_tokens=256, num_beams=4`; the first that is set wins. The last is not
    for models of type vanilla_transformer, which `generate()` limits to the source's length + 50. A length limit
    switches off those of the later places under either name (`max_length` and `max_new_tokens`, `min_length` and
    `min_new_tokens`). A `generation_config` given to the call replaces all of these but the model's own; one given to
    the constructor does so too, but for the settings of the call.

    Keyword arguments are those of `transformers.Pipeline`, any argument of a call, as its default, and `compute_type`:
    CTranslate2 computes a model of type vanilla_transformer in that ("int8", "default": as it was saved, ...), for
    which `pip install "vanilla-transformer[export]"` brings what is needed.

    Example:
        >>> pipeline("text2text-generation", model="google/flan-t5-small")("Is a horse an animal?")
        [{'generated_text': 'yes'}]
    """

    # Any, since the base class's own types for these (None, and Python tokenizers only) are narrower than its code.
    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False
    tokenizer: Any

    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)
    return_name = "generated"

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, task: str = "", **kwargs: Any) -> None:
        name = type(self).__name__
        if not model.can_generate():
            raise ValueError(f"{name} needs a model that can generate, such as AutoModelForSeq2SeqLM's: {type(model)}")
        if kwargs.pop("framework", None) not in (None, "pt"):
            raise ValueError('framework must be "pt" (PyTorch) or left out: transformers 5 has no other.')
        compute_type = kwargs.pop("compute_type", None)
        # Kept from the base class, whose own treatment of these differs from version to version.
        generation_names = {"generation_config", *vars(model.generation_config)} & kwargs.keys()
        self._constructor_settings = {key: kwargs.pop(key) for key in generation_names}
        # Without a task, since some base classes would take the prefix out of the model's config for good.
        super().__init__(model=model, tokenizer=tokenizer, task="", **kwargs)
        self.task = task
        if self.tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer, got None")
        if not model.config.is_encoder_decoder:
            logger.error(f"{name} is for encoder-decoder models, {type(model).__name__} is none: expect no sense")
        entry = copy.deepcopy(_task_specific_params(model).get(task) or {})
        self.prefix = entry.pop("prefix", self.prefix)
        self._task_settings = {key: value for key, value in entry.items() if hasattr(model.generation_config, key)}
        if compute_type is not None:
            try:  # by its name, since the package need not be where this file is
                package: Any = importlib.import_module("vanilla_transformer.export.ctranslate2_model")
            except ImportError as error:
                raise ImportError('compute_type needs pip install "vanilla-transformer[export]"') from error
            place = "cpu" if self.device.type == "mps" else str(self.device)  # the base class takes mps unasked
            self.model = package.convert_to_ctranslate2(self.model, self.tokenizer, place, compute_type)
            self.device = self.model.device

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generates for one text or for many.

        Args:
            inputs: A text, a list or other sequence of texts, a list of such lists, a torch dataset or
                `transformers.pipelines.pt_utils.KeyDataset` of texts, or a generator of texts.
            *args: Ignored, with a warning, as in every pipeline.
            **kwargs: `return_tensors` (True: token ids instead of text), `clean_up_tokenization_spaces` and
                `truncation` (as a tokenizer takes it), both False by default, `stop_sequence` (one or several, at which
                generation stops; they stay in the text), `return_scores` (True: with the score by which beam search
                ranks each sequence), `batch_size`, `max_batch_tokens` (the most padded source tokens times beams of a
                batch; may stand beside or instead of `batch_size`), `num_workers`, and every argument of `generate()`.
                Texts of a list or dataset that are batched are sorted by length within windows of 4,096 texts; those of
                a generator only with `max_batch_tokens`, since a window is read before its first result.

        Returns:
            For a text, a list with a dict for each returned sequence. For a list, the dicts in a flat list if each
            text gave one sequence, otherwise a list of lists. For datasets and generators, an iterator over such lists.
            For a list of lists, a list of what each gives. Models of type vanilla_transformer leave white space empty.
            The dicts hold `{return_name}_text`, or `{return_name}_token_ids`, a tensor (target_length,), and `score`.

        Raises:
            TypeError: If an input is not a text.
            ValueError: If a text has no tokens, a batch has no padding token, `max_batch_tokens` is below 1, or
                `return_scores` is asked for without beam search.
        """
        if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            if not (inputs := list(inputs)):  # the base class would look at the first one
                return []
            if all(isinstance(item, list) for item in inputs):
                results = iter(self(list(chain.from_iterable(inputs)), *args, **kwargs))
                return [list(islice(results, len(item))) for item in inputs]
        elif isinstance(inputs, Iterator):
            inputs = _TextStream(inputs)
        results = super().__call__(inputs, *args, **kwargs)
        is_flat = isinstance(inputs, list) and all(len(result) == 1 for result in results)
        return [result[0] for result in results] if is_flat else results

    def get_iterator(self, inputs: Any, num_workers: int, batch_size: int, *parameters: dict[str, Any]) -> Any:
        """Puts texts of like length into a batch; a `batch_size` of 1 is no limit beside `max_batch_tokens`."""
        preprocess_params, forward_params, postprocess_params = parameters
        max_tokens = forward_params.get("max_batch_tokens")
        if max_tokens is None and (batch_size == 1 or not isinstance(inputs, Sized)):
            return super().get_iterator(inputs, num_workers, batch_size, *parameters)
        # One by one, to keep the base class's way of tokenizing; what it would do with the results is left out.
        one_by_one: Any = super().get_iterator(inputs, num_workers, 1, preprocess_params, {}, {})
        collate = pad_collate_fn(self.tokenizer, None)

        def run(batch: list[Any]) -> list[Any]:
            return list(PipelineIterator([collate(batch)], self.forward, forward_params, loader_batch_size=len(batch)))

        known = self._known_settings(self._generation_settings(forward_params, {}))
        limits: Any = {"batch_size": None if batch_size == 1 else batch_size, "max_batch_tokens": max_tokens}
        limits["rows"] = max(known.get("num_beams") or 1, known.get("num_return_sequences") or 1)
        fits = partial(count_sentences, **limits)
        outputs = _ModelOutputs(one_by_one.loader.loader, run, fits)
        return PipelineIterator(outputs, self.postprocess, postprocess_params)

    def check_inputs(self, input_length: int, min_length: int, max_length: int | None) -> bool:
        """Whether such lengths promise a good result, or warns; a `max_length` of None depends on the input."""
        limit = min(self._tokenizer_limit() or _UNLIMITED, find_position_limit(self.model.config) or _UNLIMITED)
        if input_length > limit:
            logger.warning(
                f"Your input has {input_length} tokens, more than the {limit} that the model is made for: the result"
                " may be poor, or the model fail. Split the text, or shorten it with truncation=True."
            )
        return input_length <= limit

    def preprocess(self, text: Any, truncation: Any = False, **languages: Any) -> BatchEncoding:  # type: ignore[override]
        """Tokenizes one text, after the prefix that the model wants for the task: tensors (1, source_length)."""
        if not isinstance(text, str):
            raise TypeError(
                f"{type(self).__name__} takes a str, a list of str, or a dataset or generator of str, but got"
                f" {type(text).__name__}: {text!r:.100}. For one column of a dataset pass"
                " transformers.pipelines.pt_utils.KeyDataset(dataset, column)."
            )
        limit = self._truncation_limit(truncation)
        inputs = self._tokenize(text, truncation=truncation, return_tensors="pt", max_length=limit, **languages)
        if inputs["input_ids"].shape[-1] == 0:
            raise ValueError(f"The input {text!r} has no tokens, not even an end-of-sequence token: nothing to encode")
        inputs.pop("token_type_ids", None)  # some tokenizers make them, generate() refuses them
        if is_vanilla(self.model):
            inputs["is_blank"] = not text.strip()
        return inputs

    def postprocess(  # type: ignore[override]  # the base class's pre- and postprocess() are typed as taking anything
        self, model_outputs: Any, return_type: ReturnType = ReturnType.TEXT, clean_up_tokenization_spaces: bool = False
    ) -> list[dict[str, Any]]:
        """Makes a dict of each sequence in `output_ids` (1, sequences, target_length), with its score if given."""
        sequences = model_outputs["output_ids"][0]
        key, results = f"{self.return_name}_token_ids", list(sequences)
        if return_type is ReturnType.TEXT:
            settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
            key, results = f"{self.return_name}_text", [self.tokenizer.decode(each, **settings) for each in sequences]
        records: list[dict[str, Any]] = [{key: result} for result in results]
        if "scores" in model_outputs:
            for record, score in zip(records, model_outputs["scores"][0].tolist(), strict=True):
                record["score"] = score
        return records

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        return_type: ReturnType | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: Any = None,
        stop_sequence: str | list[str] | None = None,
        return_scores: bool | None = None,
        max_batch_tokens: int | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens is {max_batch_tokens}; it must be at least 1 token.")
        own = {"return_scores": return_scores, "max_batch_tokens": max_batch_tokens}
        generate_kwargs |= {name: value for name, value in own.items() if value is not None}
        if stop_sequence is not None:
            generate_kwargs["stop_sequence"] = [stop_sequence] if isinstance(stop_sequence, str) else stop_sequence
        if self.assistant_model is not None:
            generate_kwargs["assistant_model"] = self.assistant_model
        if self.assistant_tokenizer is not None:
            generate_kwargs.update(tokenizer=self.tokenizer, assistant_tokenizer=self.assistant_tokenizer)
        if return_type is None and return_tensors is not None:
            return_type = ReturnType.TENSORS if return_tensors else ReturnType.TEXT
        postprocess = {"return_type": return_type, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        preprocess = {} if truncation is None else {"truncation": truncation}
        return preprocess, generate_kwargs, {name: value for name, value in postprocess.items() if value is not None}

    def _truncation_limit(self, truncation: Any) -> int | None:
        """How many tokens are left of a longer text, if it is truncated."""
        if not truncation or truncation == "do_not_truncate":
            return None
        # Otherwise a tokenizer saved without its limit would truncate nothing, and one that allows more too little.
        limits = [self._tokenizer_limit()]
        if limits == [None] or getattr(self.model.config, "position_embedding_type", None) == "learned":
            limits.append(find_position_limit(self.model.config))
        return min(filter(None, limits), default=None)

    def _tokenize(self, text: str, **arguments: Any) -> BatchEncoding:
        return self.tokenizer((self.prefix or "") + text, **arguments)

    def _forward(self, input_tensors: Any, **forward_parameters: Any) -> Any:
        inputs = dict(input_tensors)
        added: dict[str, Any] = {}
        if "forced_bos_token_id" in inputs:
            token_id = inputs.pop("forced_bos_token_id")
            # Batching makes a list of it, with the same id for each text, while generate() takes one for all.
            added["forced_bos_token_id"] = token_id[0] if isinstance(token_id, list) else token_id
        batch_size, source_length = inputs["input_ids"].shape
        blank = torch.tensor(inputs.pop("is_blank", False)).expand(batch_size).to(inputs["input_ids"].device)
        return_scores = forward_parameters.get("return_scores", False)
        if return_scores:
            added |= sequence_score_settings(self.model)
        settings = self._generation_settings(forward_parameters, added)
        if (stop_sequences := forward_parameters.get("stop_sequence")) is not None:
            criteria = [*(settings.get("stopping_criteria") or []), _StopSequences(self.tokenizer, stop_sequences)]
            settings["stopping_criteria"] = StoppingCriteriaList(criteria)
        self.check_inputs(source_length, *self._output_lengths(settings))
        model: Any = self.model
        output = model.generate(**inputs, **settings)
        sequences = output["sequences"] if isinstance(output, ModelOutput) else output
        outputs = {"output_ids": sequences.reshape(batch_size, -1, sequences.shape[-1])}
        if return_scores:
            scores = getattr(output, "sequences_scores", None)
            if scores is None:
                raise ValueError("return_scores needs beam search, which ranks sequences: set num_beams to 2 or more.")
            outputs["scores"] = scores.reshape(batch_size, -1).masked_fill(blank[:, None], 0.0)
        if blank.any():  # the model has made something up: empty sequences take its place
            outputs["output_ids"] = outputs["output_ids"].masked_fill(blank[:, None, None], self.tokenizer.eos_token_id)
        return outputs

    def _generation_settings(self, call: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
        """The arguments for `generate()`, from all sources (see the class) but the model's generation config."""
        call = {name: value for name, value in call.items() if name not in _OWN_ARGUMENTS}
        if call.get("generation_config") is None:
            call = _override(self._constructor_settings, call)
        added = dict(added)
        if self.model.generation_config.pad_token_id is None and self.tokenizer.pad_token_id is not None:
            added["pad_token_id"] = self.tokenizer.pad_token_id
        config = call.get("generation_config")
        if config is None:
            return {**self._default_settings(call), **added, **call}
        config = copy.deepcopy(config)  # to take them in: generate() does not like settings beside a config
        if config.pad_token_id is not None:
            added.pop("pad_token_id", None)
        prompt = call.get("decoder_input_ids")
        length = 1 if prompt is None else prompt.shape[-1]
        for name, winner in _LIMITS:  # the model's own winner would fill the place that the config leaves empty
            own, limit = getattr(self.model.generation_config, winner), getattr(config, name)
            if own is not None and limit is not None and getattr(config, winner) is None:
                if name == "max_length" and limit <= length:
                    raise ValueError(f"max_length={limit} leaves no room behind the {length} token(s) to begin with.")
                added |= {name: None, winner: max(limit - length, 0)}
        config.update(**added)
        return {**_override({}, call), "generation_config": config}

    def _default_settings(self, call: dict[str, Any]) -> dict[str, Any]:
        """What `generate()` has to be told besides the call, out of the task's settings and the pipeline's own."""
        own = self.model.generation_config.to_diff_dict()
        known = {} if is_vanilla(self.model) else self._default_generation_config.to_diff_dict()
        known.pop("transformers_version", None)
        if "assistant_model" in call or "streamer" in call:
            known.pop("num_beams", None)  # neither works with beam search
        for settings in (own, self._task_settings, call):
            known = _override(known, settings)
        return {name: value for name, value in known.items() if name not in call and value != own.get(name)}

    def _known_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """All that `generate()` will know when it is given these settings."""
        config = settings.get("generation_config") or GenerationConfig()
        return {**self.model.generation_config.to_diff_dict(), **config.to_diff_dict(), **settings}

    def _output_lengths(self, settings: dict[str, Any]) -> tuple[int, int | None]:
        """The least and the largest number of tokens that `generate()` will make, None where its input says that."""
        known = self._known_settings(settings)
        least = known.get("min_new_tokens") or known.get("min_length") or 0
        default = None if is_vanilla(self.model) else LIBRARY_MAX_LENGTH
        return least, known.get("max_new_tokens") or known.get("max_length") or default

    def _tokenizer_limit(self) -> int | None:
        limit = self.tokenizer.model_max_length
        return limit if limit < _UNLIMITED else None


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Summarizes texts (task `"summarization"`); see `Text2TextGenerationPipeline` for arguments and settings.

    Example:
        >>> pipeline("summarization", model="facebook/bart-large-cnn")(article, max_length=60)
        [{'summary_text': '...'}]
    """

    return_name = "summary"

    def check_inputs(self, input_length: int, min_length: int, max_length: int | None) -> bool:
        """Warns also of a summary that cannot be, or may be longer than the text. Arguments as in the base class."""
        fine = super().check_inputs(input_length, min_length, max_length)
        if max_length is None:
            return fine
        if max_length < min_length:
            logger.warning(f"Your min_length={min_length} is above your max_length={max_length}.")
            fine = False
        own = self.model.generation_config
        # The limit that training saved is for texts of any length.
        is_saved = is_vanilla(self.model) and max_length in (own.max_new_tokens, own.max_length)
        if input_length < max_length and not is_saved:
            logger.warning(
                f"Your max_length is set to {max_length}, but your input_length is only {input_length}. For a summary"
                f" shorter than its text, decrease it, for example summarizer('...', max_length={input_length // 2})."
            )
            fine = False
        return fine


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translates texts (tasks `"translation"` and `"translation_xx_to_yy"`).

    Multilingual models (M2M100, NLLB, mBART, ...) need `src_lang` and `tgt_lang`, in their tokenizer's own codes, in
    the constructor, the call or the task's name. So do those, such as T5, whose config has tasks
    `"translation_{src_lang}_to_{tgt_lang}"` with a prefix each; `"translation"` alone is the first of them. Models of
    type vanilla_transformer refuse languages that their config does not have (in `langs`, a pair, or such tasks); those
    of other types ignore them. Other arguments are those of `Text2TextGenerationPipeline`.

    Example:
        >>> translator = pipeline("translation", model="facebook/nllb-200-distilled-600M", src_lang="eng_Latn")
        >>> translator("A man rides a horse.", tgt_lang="deu_Latn")
    """

    return_name = "translation"

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, task: str = "", **kwargs: Any) -> None:
        if task == "translation":
            task = self._task_of_config(model, kwargs.get("src_lang"), kwargs.get("tgt_lang"))
        pair = parse_language_pair(task)
        check_languages(model, *(pair or (None, None)))
        super().__init__(model=model, tokenizer=tokenizer, task=task, **kwargs)
        if pair is not None:
            self._preprocess_params = {"src_lang": pair[0], "tgt_lang": pair[1], **self._preprocess_params}

    def check_inputs(self, input_length: int, min_length: int, max_length: int | None) -> bool:
        """Warns also of an output limit that may cut the translation off. Arguments as in the base class."""
        fine = super().check_inputs(input_length, min_length, max_length)
        if max_length is not None and input_length > 0.9 * max_length:
            logger.warning(
                f"Your input_length: {input_length} is bigger than 0.9 * max_length: {max_length}. If translations end"
                f" too early, increase it, for example translator('...', max_length={2 * input_length})."
            )
            fine = False
        return fine

    def _sanitize_parameters(  # type: ignore[override]  # always called by keyword
        self, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess_params, forward_params, postprocess_params = super()._sanitize_parameters(**kwargs)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        given = {key: value for key, value in languages.items() if value is not None}
        check_languages(self.model, src_lang, tgt_lang)
        is_known = bool(find_directions(self.model.config, src_lang, tgt_lang))
        if given and not is_known and not hasattr(self.tokenizer, "_build_translation_inputs"):
            logger.warning(f"{type(self.tokenizer).__name__} knows no languages, so {given} has no effect")
        return {**preprocess_params, **given}, forward_params, postprocess_params

    def _tokenize(
        self, text: str, src_lang: str | None = None, tgt_lang: str | None = None, **arguments: Any
    ) -> BatchEncoding:
        build = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build is None:
            return self.tokenizer(self._choose_prefix(src_lang, tgt_lang) + text, **arguments)
        name = type(self.tokenizer).__name__
        try:
            inputs: BatchEncoding = build(text, src_lang=src_lang, tgt_lang=tgt_lang, **arguments)
        except KeyError as error:
            raise ValueError(f"{name} does not know the language {error}: {src_lang=}, {tgt_lang=}") from error
        # Most tokenizers take any token for a language, and the model would make nonsense of that.
        source_id, target_id = getattr(self.tokenizer, "cur_lang_code", None), inputs["forced_bos_token_id"]
        for argument, language, token_id in (("src_lang", src_lang, source_id), ("tgt_lang", tgt_lang, target_id)):
            if token_id is not None and not is_language_token(self.tokenizer, token_id):
                raise ValueError(f"{argument}={language!r} is not a language code in the vocabulary of {name}")
        return inputs

    def _choose_prefix(self, src_lang: str | None, tgt_lang: str | None) -> str:
        """That of the languages, or else of the task."""
        is_known = check_languages(self.model, src_lang, tgt_lang) or src_lang or tgt_lang
        found = find_directions(self.model.config, src_lang, tgt_lang) if is_known else {}
        if len(prefixes := set(found.values()) or {self.prefix or ""}) > 1:
            raise ValueError(f"Give src_lang and tgt_lang, such as those of {', '.join(map(' to '.join, found))}.")
        return prefixes.pop()

    @staticmethod
    def _task_of_config(model: PreTrainedModel, src_lang: str | None, tgt_lang: str | None) -> str:
        """The translation task that a model such as T5 wants instead of `"translation"`."""
        tasks = [task for task in _task_specific_params(model) if task.startswith("translation")]
        asked = f"translation_{src_lang}_to_{tgt_lang}"
        if not tasks or src_lang is not None or tgt_lang is not None:
            return asked if asked in tasks else "translation"
        if tasks[0] != "translation":
            reason = f"'translation' names no languages, so '{tasks[0]}' is used, the first of its tasks: {tasks}"
            warnings.warn(reason, UserWarning, stacklevel=3)
        return tasks[0]
