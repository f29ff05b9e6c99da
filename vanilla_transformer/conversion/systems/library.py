"""What MarianMT and FSMT have in common: models of transformers, whose layers have the names of this package's."""

import copy
import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, has_file

from vanilla_transformer.conversion.converted import Batch, ConvertedModel, as_float32, build_model, compare_with
from vanilla_transformer.conversion.errors import ConversionError, find_excess_tokens, refuse
from vanilla_transformer.conversion.weights import CODE_IN_PICKLE, Rule, check_sinusoids
from vanilla_transformer.files import read_json
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

_LAYER_RULES = (
    Rule(
        r"(model\.(?:encoder|decoder)\.layers\.\d+\.(?:(?:self|encoder)_attn\.[qkvo](?:ut)?_proj|fc[12]"
        r"|(?:self_attn|encoder_attn|final)_layer_norm)\.(?:weight|bias))",
        r"\1",
    ),
    Rule(r"(model\.(?:encoder|decoder)\.embed_tokens\.weight)", r"\1"),
)
# Configuration fields that mean the same in all three models.
_COMMON_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "activation_function", "scale_embedding", "max_position_embeddings"),
    *("dropout", "attention_dropout", "activation_dropout", "use_cache"),
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"),
)
# Old configurations have these fields. The library's models ignore them: nobody knows what such weights compute.
IGNORED_FIELDS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm"), (None, False)),
    "static_position_embeddings": (None, True),
    "quantization_config": (None,),
}
READING_ERRORS = (
    *(OSError, TypeError, ValueError, RuntimeError, LookupError, AttributeError, EOFError),
    *(pickle.UnpicklingError, SafetensorError, StrictDataclassError),
)


@dataclass(frozen=True)
class LibraryModel:
    """Where a model of the library is: a folder, or a name and a revision on the Hub."""

    kind: str  # for messages: "MarianMT"
    name_or_path: str
    revision: str

    @property
    def source(self) -> str:
        """What is converted, for messages."""
        return f"the {self.kind} model {self.name_or_path}"

    def read_config(self, config_class: type[PreTrainedConfig]) -> Any:
        """Reads the configuration, which must be of this class."""
        path = Path(self.name_or_path)
        is_path = path.is_absolute() or len(path.parts) > 2 or self.name_or_path.startswith(".")
        if path.is_file() or (is_path and not path.is_dir()):
            raise ConversionError(f"{path} is no folder. Name one with a {self.kind} model, or a model on the Hub.")
        with self._explain_errors():
            fields, _ = PreTrainedConfig.get_config_dict(self.name_or_path, revision=self.revision)
        if not fields or not isinstance(fields, dict):
            raise ConversionError(f"{self.name_or_path} is no {self.kind} model: it has no config.json with settings.")
        if fields.get("model_type") != config_class.model_type:
            found = f"the model_type in its config.json is {fields.get('model_type')!r}"
            raise ConversionError(f"{self.name_or_path} is no {self.kind} model: {found}.")
        with self._explain_errors():
            return config_class.from_pretrained(self.name_or_path, revision=self.revision)

    def load(self, model_class: type[PreTrainedModel], computed: str) -> Any:
        """Loads the model as the library does, in evaluation mode, with the floating-point type of its file.

        Weights that the file lacks are listed unless their names match the regular expression `computed`.
        """
        with self._explain_errors(), _quiet("transformers.modeling_utils"):
            if self._has("generation_config.json"):  # the library replaces damaged settings by others without a word
                GenerationConfig.from_pretrained(self.name_or_path, revision=self.revision)
            model_and_info: Any = model_class.from_pretrained(
                self.name_or_path,
                revision=self.revision,
                dtype="auto",
                # Named here, since a configuration may ask for code of the Hub.
                attn_implementation="eager",
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that all of them are listed
                output_loading_info=True,
            )
        model, info = model_and_info
        reasons = [f"{name} is missing" for name in sorted(info["missing_keys"]) if not re.search(computed, name)]
        reasons += [f"{name} is no weight of the model" for name in sorted(info["unexpected_keys"])]
        for name, found, wanted in sorted(info["mismatched_keys"]):
            reasons.append(f"{name} has the shape {tuple(found)} instead of {tuple(wanted)}")
        refuse(f"The weights of {self.source} are not those that its configuration describes", reasons)
        return model.eval()

    def _has(self, name: str) -> bool:
        return has_file(self.name_or_path, name, revision=self.revision)

    def load_tokenizer(self, files: Sequence[str]) -> PreTrainedTokenizerBase | None:
        """Loads the tokenizer, whose own kind has these vocabulary files; `None` if there is no vocabulary."""
        needed = "needs a package that is not installed (sentencepiece for MarianMT, sacremoses for FSMT)"
        extra = ImportError(f"The tokenizer of {self.source} {needed}: pip install 'vanilla-transformer[convert]'")
        with self._explain_errors():
            absent = [name for name in files if not self._has(name)]
            if not self._has("tokenizer.json"):
                if len(absent) == len(files):
                    return None
                refuse(f"The vocabulary of {self.source} is not whole", [f"{name} is missing" for name in absent])
                if any(name.endswith(".spm") for name in files) and find_spec("sentencepiece") is None:
                    raise extra
            for name in (*files, "target_vocab.json"):
                if name.endswith(".json") and self._has(name):
                    self._check_ids(name)
        try:
            with self._explain_errors():
                return AutoTokenizer.from_pretrained(self.name_or_path, revision=self.revision, trust_remote_code=False)
        except ImportError as error:
            raise extra from error
        except AssertionError as error:  # what tokenizers raise where a file is missing
            raise ConversionError(f"The tokenizer of {self.source} cannot be read: {error}") from error

    def _check_ids(self, name: str) -> None:
        """Refuses a vocabulary that does not give each token an id; the library would read anything."""
        path = cached_file(self.name_or_path, name, revision=self.revision)
        vocabulary = read_json(Path(cast(str, path)))
        if not isinstance(vocabulary, dict):
            raise ConversionError(f"{path} is no vocabulary, a JSON object with an id for each token.")
        wrong = [f"{token!r} has the id {given!r}" for token, given in vocabulary.items() if type(given) is not int]
        refuse(f"{path} is no vocabulary (ids can be: whole numbers)", wrong[:8])

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except ConversionError:
            raise
        except READING_ERRORS as error:
            reason = f"a file is missing, truncated or of another kind ({str(error).strip().splitlines()[0]})"
            if isinstance(error, pickle.UnpicklingError) and (code := CODE_IN_PICKLE.search(str(error))):
                reason = f"a file holds more than weights: it needs {code[1]}, and reading that would run code of it"
            raise ConversionError(f"{self.name_or_path} cannot be read as a {self.kind} model: {reason}.") from error


def read_common_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says in the fields that all three models have, and of tasks, with their prefixes."""
    fields = {name: getattr(config, name) for name in _COMMON_FIELDS}
    tasks = getattr(config, "task_specific_params", None)
    return fields if tasks is None else {**fields, "task_specific_params": copy.deepcopy(tasks)}


def make_rules(config: VanillaTransformerConfig) -> tuple[Rule, ...]:
    """Makes the common rules; stored tables of sinusoids are not needed, but must be what the model computes."""
    check = partial(check_sinusoids, kind=config.position_embedding_type, skip=config.position_offset)
    return (*_LAYER_RULES, Rule(r"model\.(?:encoder|decoder)\.embed_positions\.weight", (), check=check))


def take_generation_config(original: Any) -> GenerationConfig:
    """Returns a copy of a model's settings for `generate`, among them those that stood in an old `config.json`."""
    settings = copy.deepcopy(original.generation_config)
    # Or the library would forget entries of its own making when it loads the saved model.
    settings._from_model_config = False
    return settings


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: VanillaTransformerConfig, source: str) -> None:
    """Refuses a tokenizer that has ids beyond the model's."""
    subject = f"The tokenizer of {source} ({type(tokenizer).__name__}) does not belong to its model"
    refuse(subject, find_excess_tokens(tokenizer, config))


def convert_loaded(
    place: LibraryModel,
    original: Any,
    config: VanillaTransformerConfig,
    rules: Iterable[Rule],
    tokenizer: PreTrainedTokenizerBase | None,
) -> ConvertedModel:
    """Makes what a converter returns from all that it has read; the tokenizer stays what it is."""
    generation_config = take_generation_config(original)
    model = build_model(config, original.state_dict(), rules, source=place.source, generation_config=generation_config)
    notes = _describe_differences(original.config, generation_config)
    if tokenizer is None:
        notes.append(f"There is no tokenizer: no vocabulary was found in {place.name_or_path}.")

    def compute(batch: Batch) -> torch.Tensor:
        return cast(torch.Tensor, as_float32(original)(**batch, use_cache=False).logits)

    compare = partial(compare_with, compute, model)
    return ConvertedModel(source=place.source, model=model, tokenizer=tokenizer, compare=compare, notes=tuple(notes))


def _describe_differences(config: PreTrainedConfig, generation_config: GenerationConfig) -> list[str]:
    dropped = {name: getattr(config, name) for name in ("encoder_layerdrop", "decoder_layerdrop")}
    effect = "it has an effect in training only"
    notes = [f"{name}={share} is left out: {effect}." for name, share in dropped.items() if share]
    if generation_config.max_length is None and generation_config.max_new_tokens is None:
        notes.append("There is no max_length: translations end at the source's length + 50; the original's at 20.")
    return notes


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silences a logger: it would warn of weights that are not in the file, and those that must be are asked for."""
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
