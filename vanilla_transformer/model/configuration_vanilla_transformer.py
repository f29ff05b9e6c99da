"""Configuration of the original Transformer: the only place of defaults, presets and validation.

The defaults are the "base" model of Table 3 in "Attention Is All You Need" (Vaswani et al., 2017). Field names are
those of BART and Marian, so that tools which read those configurations read this one; `d_k` and `d_v` are the paper's.
"""

import copy
import difflib
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, Self

import transformers

# Before all other imports, of which older versions lack some.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 12):
    raise ImportError(
        f"This model needs transformers >= 5.12, and this is {transformers.__version__}: "
        'pip install --upgrade "transformers>=5.12"'
    )

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

logger = logging.get_logger(__name__)

Side = Literal["encoder", "decoder"]

# What the library and its tools (`config_version`: this package) write into config.json, or once did.
_LIBRARY_FIELDS = {
    *("adapters", "add_cross_attention", "attn_implementation", "auto_map", "base_model_pp_plan", "base_model_tp_plan"),
    *("compression_config", "config_version", "configuration_files", "cross_attention_hidden_size", "custom_pipelines"),
    *("distributed_config", "experts_implementation", "finetuning_task", "fusion_config", "gradient_checkpointing"),
    *("output_past", "per_layer_config", "prefix", "processor_class", "pruned_heads"),
    *("quantization_config", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder"),
    *("tie_last_hidden_states", "tokenizer_class", "torchscript", "transformers.js_config", "transformers_weights"),
    *("use_bfloat16",),
}

POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor", "learned")

# Which pipeline is for which task, as a process without this package finds it.
_PIPELINES = {
    "translation": "TranslationPipeline",
    "summarization": "SummarizationPipeline",
    "text2text-generation": "Text2TextGenerationPipeline",
}

# Where a process without this package finds the classes of an encoder-decoder, of an encoder and of a decoder.
_CONFIG = {"AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig"}
AUTO_MAP = {
    **_CONFIG,
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "generation_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}
_ENCODER_AUTO_MAP = {
    **_CONFIG,
    "AutoModel": "encoder_only_vanilla_transformer.VanillaTransformerEncoderModel",
    "AutoModelForQuestionAnswering": "encoder_only_vanilla_transformer.VanillaTransformerForQuestionAnswering",
    "AutoModelForSequenceClassification": (
        "encoder_only_vanilla_transformer.VanillaTransformerForSequenceClassification"
    ),
    "AutoModelForTextEncoding": "encoder_only_vanilla_transformer.VanillaTransformerEncoderModel",
    "AutoModelForTokenClassification": "encoder_only_vanilla_transformer.VanillaTransformerForTokenClassification",
}
_DECODER_AUTO_MAP = {
    **_CONFIG,
    "AutoModel": "decoder_only_vanilla_transformer.VanillaTransformerDecoderModel",
    "AutoModelForCausalLM": "decoder_only_vanilla_transformer.VanillaTransformerForCausalLM",
}

_TABLES = {
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def _both(**sizes: int) -> dict[str, int]:
    """Sizes of both stacks, such as `encoder_layers` and `decoder_layers` from `layers`."""
    return {f"{side}_{size}": value for size, value in sizes.items() for side in ("encoder", "decoder")}


# Table 3 has no row without label smoothing but D-ls0, hence its place in every preset made for training.
_BASE = {"label_smoothing": 0.1}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 320,
        "d_model": 32,
        **_both(layers=2, attention_heads=4, ffn_dim=64),
        "max_position_embeddings": 128,
    },
    "small": {**_BASE, "vocab_size": 8000, "d_model": 256, **_both(layers=3, attention_heads=4, ffn_dim=1024)},
    "iwslt": {**_BASE, "vocab_size": 10000, **_both(attention_heads=4, ffn_dim=1024), "dropout": 0.3},
    # A deep encoder and a shallow decoder, which takes nearly all of the time (Kasai et al., 2021): for distillation.
    "student": {**_BASE, "encoder_layers": 12, "decoder_layers": 2},
    "base": {**_BASE},
    "big": {**_BASE, "d_model": 1024, **_both(attention_heads=16, ffn_dim=4096), "dropout": 0.3},
    # Table 3: rows A (heads), B (size of keys), C (depth, width, inner width), D (regularisation), E (positions).
    **{f"A-h{heads}": {**_BASE, **_both(attention_heads=heads)} for heads in (1, 4, 16, 32)},
    **{f"B-dk{d_k}": {**_BASE, "d_k": d_k} for d_k in (16, 32)},
    **{f"C-N{layers}": {**_BASE, **_both(layers=layers)} for layers in (2, 4, 8)},
    **{f"C-d{width}": {**_BASE, "d_model": width, "d_k": width // 8, "d_v": width // 8} for width in (256, 1024)},
    **{f"C-ff{width}": {**_BASE, **_both(ffn_dim=width)} for width in (1024, 4096)},
    "D-drop0": {**_BASE, "dropout": 0.0},
    "D-drop0.2": {**_BASE, "dropout": 0.2},
    "D-ls0": {"label_smoothing": 0.0},
    "D-ls0.2": {"label_smoothing": 0.2},
    "E-learned": {**_BASE, "position_embedding_type": "learned"},
}


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    r"""Configuration of a [`VanillaTransformerForConditionalGeneration`], and of encoder-only and decoder-only models.

    Args:
        vocab_size: Number of tokens of the vocabulary (of the source vocabulary, where there are two).
        decoder_vocab_size: Number of tokens of the target vocabulary. `None`: one vocabulary serves both sides.
        d_model: Width of embeddings and of every sub-layer's output.
        encoder_layers, decoder_layers: Number of layers (the paper's N).
        encoder_attention_heads, decoder_attention_heads: Number of attention heads (the paper's h). The library's names
            `num_hidden_layers` and `num_attention_heads` mean the encoder's, as in BART.
        encoder_ffn_dim, decoder_ffn_dim: Inner width of the feed-forward networks (the paper's d_ff).
        d_k, d_v: Size of one head's keys and values. `None`: d_model / heads.
        dropout: Probability of dropping an element of a sub-layer's output, or of embeddings with positions (5.4).
        attention_dropout, activation_dropout: The same for attention weights and for the inner activations of the
            feed-forward networks.
        activation_function: Activation of the feed-forward networks, any name in `ACT2FN`.
        attention_bias, ffn_bias, lm_head_bias: Whether those linear maps have a bias (3.2: none, 3.3: b1 and b2).
        normalize_before: `False`: LayerNorm(x + Sublayer(x)) as in 3.1 (post-LN). `True`: x + Sublayer(LayerNorm(x))
            (pre-LN).
        add_final_layer_norm: Whether each stack ends with one more norm. `None`: as usual, after pre-LN only.
            torch.nn.Transformer ends with one after post-LN too.
        normalize_embedding: Whether to normalise the sum of embeddings and positions.
        layer_norm_eps: Added to the variance in every LayerNorm.
        scale_embedding: Whether to multiply embeddings by sqrt(d_model) (3.4).
        position_embedding_type: `"sinusoidal"`: 3.5, sine and cosine interleaved. `"sinusoidal_concatenated"`: the same
            values, all sines first (Marian). `"sinusoidal_tensor2tensor"`: sines first, frequencies spaced by
            log(10000)/(d_model/2 - 1) (tensor2tensor, fairseq, FSMT). `"learned"`: a trained table (Table 3, row E).
        position_offset: Position of the first token (fairseq: padding index + 1).
        max_position_embeddings: Number of rows of the position table. Sinusoids go on beyond it; a learned table ends
            there.
        share_encoder_decoder_embeddings: Whether encoder and decoder have one embedding table.
        tie_word_embeddings: Whether the output layer is the decoder's embedding table (3.4).
        initializer_gain: What the bounds of Xavier's initial values are multiplied by, in all projections and
            feed-forward networks. 1 is tensor2tensor's; with 0.5, a post-LN model learns to translate faster.
        label_smoothing: Label smoothing of the model's own loss, in training mode only (5.4); in evaluation mode the
            loss is the plain negative log-likelihood per token.
        langs: The languages translated from and to, such as `["en", "de"]`. They add the task `"translation_en_to_de"`
            to those that the saved folder offers without this package, unless one contains "_".
        is_encoder_decoder: `False`: the configuration of a single-stack model, which makes it from that of an
            encoder-decoder.
        is_decoder: Whether that stack is the decoder.
        bos_token_id, pad_token_id, eos_token_id, decoder_start_token_id: Ids of the special tokens.

    Raises:
        StrictDataclassError: The library's own error for configurations, if a value is not legal; the message names the
            field, the value and what is legal.

    Example:
    ```python
    >>> from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

    >>> config = VanillaTransformerConfig.from_preset("base", vocab_size=32000)
    >>> model = VanillaTransformerForConditionalGeneration(config)
    ```
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    d_k: int | None = None
    d_v: int | None = None
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    attention_bias: bool = False
    ffn_bias: bool = True
    lm_head_bias: bool = False
    normalize_before: bool = False
    add_final_layer_norm: bool | None = None
    normalize_embedding: bool = False
    layer_norm_eps: float | int = 1e-5
    scale_embedding: bool = True
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    initializer_gain: float | int = 1.0
    label_smoothing: float | int = 0.0
    langs: list[str] | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("config_version", None)
        if message := self.find_unknown_fields(kwargs):
            logger.warning(message)
        # The library would look at this entry before the registered pipelines, and ask for `trust_remote_code`.
        if not __name__.startswith("transformers_modules."):
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "VanillaTransformerConfig":
        """Builds the configuration of a model of the paper, a key of `PRESETS`, but for the fields in `overrides`."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}. The presets are: {', '.join(PRESETS)}.")
        legal = {field.name for field in fields(cls)} | set(cls.attribute_map) | {"num_labels"}
        if unknown := sorted(set(overrides) - legal):
            raise ValueError(
                f"Not fields of {cls.__name__}: {', '.join(unknown)}. Its fields are: {', '.join(sorted(legal))}."
            )
        settings = {cls.attribute_map.get(field, field): value for field, value in overrides.items()}
        return cls(**{**PRESETS[name], **settings})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """As the library does, but no file can name a kernel of the Hub for attention: the library would run it."""
        config_dict = dict(config_dict)
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(config_dict.get(name)):
                logger.warning(f"{name}={config_dict.pop(name)!r} of the file is ignored: give it as an argument.")
        if kwargs.get("is_encoder_decoder"):  # also when it starts from a decoder-only model
            kwargs = {"is_decoder": False, **kwargs}
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def find_unknown_fields(cls, names: Iterable[str]) -> str | None:
        """Says which names are fields neither of this class nor of the library, misspelt ones for example."""
        known = {*cls.attribute_map, *_LIBRARY_FIELDS, *vars(GenerationConfig())}
        legal = [*(field.name for field in fields(cls)), *cls.attribute_map]
        described = []
        for name in names:
            # As attributes the class has its fields, and properties that the library accepts for fields.
            if name in known or name.startswith("_") or hasattr(cls, name):
                continue
            match = difflib.get_close_matches(name, legal, n=1, cutoff=0.7)
            described.append(name + (f" (did you mean {match[0]}?)" if match else ""))
        if not described:
            return None
        return f"Not fields of {cls.__name__}, and without effect: {', '.join(described)}."

    @property
    def target_vocab_size(self) -> int:
        """Number of tokens of the target vocabulary (`decoder_vocab_size`, or `vocab_size` where there is one)."""
        return self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size

    @property
    def has_final_layer_norm(self) -> bool:
        """Whether each stack ends with one more norm (`add_final_layer_norm`, or as `normalize_before` asks for)."""
        return self.normalize_before if self.add_final_layer_norm is None else self.add_final_layer_norm

    @property
    def custom_pipeline_tasks(self) -> dict[str, dict[str, Any]]:
        """The tasks of `pipeline()` that a saved folder offers: those of `task_specific_params`, or translation."""
        kinds = {task: task.partition("_")[0] for task in getattr(self, "task_specific_params", None) or {}}
        kinds = {task: kind for task, kind in kinds.items() if kind in _PIPELINES}
        if not kinds or "translation" in kinds.values():
            kinds["translation"] = "translation"
            if self.langs is not None and not any("_" in lang for lang in self.langs):
                kinds["translation_{}_to_{}".format(*self.langs)] = "translation"
        common = {"pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
        return {
            task: {"impl": f"pipeline_vanilla_transformer.{_PIPELINES[kind]}", **common} for task, kind in kinds.items()
        }

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Returns the configuration, or a copy in which one side's fields have the plain names of a single stack."""
        config = self
        if decoder and not encoder:
            # The library turns `decoder_vocab_size` into `vocab_size` here, for which None is not legal.
            config = copy.copy(self)
            config.decoder_vocab_size = self.target_vocab_size
        return super(VanillaTransformerConfig, config).get_text_config(decoder=decoder, encoder=encoder)

    def to_dict(self) -> dict[str, Any]:
        """Serialises the configuration, with where the library finds the code that travels with a model."""
        settings = super().to_dict()
        settings.pop("custom_pipelines", None)
        if self.is_encoder_decoder:
            settings["custom_pipelines"] = self.custom_pipeline_tasks
        # What was loaded may name this package's files as another version called them. A user's own classes stay.
        loaded = settings.get("auto_map", {})
        own = "_vanilla_transformer.VanillaTransformer"
        others = {auto_class: name for auto_class, name in loaded.items() if own not in str(name)}
        settings["auto_map"] = {**self._auto_map, **others}
        return settings

    @property
    def _auto_map(self) -> dict[str, str]:
        if self.is_encoder_decoder:
            return AUTO_MAP
        return _DECODER_AUTO_MAP if self.is_decoder else _ENCODER_AUTO_MAP

    def require_stacks(self, name: str, side: Side | None = None) -> None:
        """Makes sure that a model has the stacks it is made of: one side, or both (`side=None`)."""
        own: Side = "decoder" if self.is_decoder else "encoder"
        if self.is_encoder_decoder or own == side:
            return
        saved = f", saved by {self.architectures[0]}" if self.architectures else ""
        legal = ", ".join(auto_class for auto_class in self._auto_map if auto_class != "AutoConfig")
        needed = "an encoder and a decoder" if side is None else f"one {side}"
        raise ValueError(
            f"{name} is {needed}, but the configuration is of one {own} alone (is_encoder_decoder=False, "
            f"is_decoder={self.is_decoder}{saved}): load it with {legal}."
        )

    def validate_sizes(self) -> None:
        """Every size is a positive integer; heads divide the width where no head size is given."""
        positive = ["vocab_size", "d_model", "max_position_embeddings"]
        positive += [
            f"{side}_{size}" for side in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")
        ]
        optional = [name for name in ("decoder_vocab_size", "d_k", "d_v") if getattr(self, name) is not None]
        for name in positive + optional:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if (self.d_k is None or self.d_v is None) and self.d_model % heads:
                raise ValueError(
                    f"{side}_attention_heads={heads} must divide d_model={self.d_model}; or give both d_k and d_v."
                )

    def validate_probabilities(self) -> None:
        """Dropout and label smoothing are probabilities below one."""
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}.")

    def validate_functions(self) -> None:
        """The names of functions are known; the norm's epsilon and the initial values' gain are positive."""
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function must be one of {', '.join(sorted(ACT2FN))}, not {self.activation_function!r}."
            )
        for name in ("layer_norm_eps", "initializer_gain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}.")

    def validate_positions(self) -> None:
        """The position embedding exists for this width and offset."""
        if self.position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type must be one of {', '.join(POSITION_EMBEDDING_TYPES)}, "
                f"not {self.position_embedding_type!r}."
            )
        if self.position_offset < 0:
            raise ValueError(f"position_offset must be at least 0, not {self.position_offset}.")
        if self.position_embedding_type == "learned":
            if self.position_offset >= self.max_position_embeddings:
                raise ValueError(
                    f"position_offset must be below max_position_embeddings={self.max_position_embeddings} for learned "
                    f"positions, not {self.position_offset}."
                )
        elif self.d_model % 2 or (self.position_embedding_type == "sinusoidal_tensor2tensor" and self.d_model < 4):
            raise ValueError(
                f"d_model must be even for {self.position_embedding_type} positions (at least 4 for "
                f"sinusoidal_tensor2tensor), not {self.d_model}."
            )

    def validate_vocabularies(self) -> None:
        """Sharing needs one vocabulary, and special tokens lie inside theirs."""
        if self.share_encoder_decoder_embeddings and self.target_vocab_size != self.vocab_size:
            raise ValueError(
                "share_encoder_decoder_embeddings=True needs equal vocabularies, but vocab_size="
                f"{self.vocab_size} and decoder_vocab_size={self.decoder_vocab_size}; set it to False."
            )
        smallest = min(self.vocab_size, self.target_vocab_size)
        for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < smallest:
                    raise ValueError(f"{name} must be in [0, {smallest}), the smallest vocabulary, not {token_id}.")

    def validate_langs(self) -> None:
        """Languages come in pairs."""
        if self.langs is not None and (len(self.langs) != 2 or not all(lang.strip() for lang in self.langs)):
            raise ValueError(f"langs must be the source and the target language, as ['en', 'de'], not {self.langs}.")


def as_single_stack(config: VanillaTransformerConfig, side: Side) -> VanillaTransformerConfig:
    """Returns a single-stack model's configuration: a copy of an encoder-decoder's, or what is given if it is one."""
    # Both sides' sizes are the stack's, since the library knows one name for either.
    settings: dict[str, Any] = {"is_encoder_decoder": False, "is_decoder": side == "decoder"}
    settings["decoder_vocab_size"] = None
    if config.is_encoder_decoder and side == "decoder":
        settings["vocab_size"] = config.target_vocab_size
        if config.decoder_start_token_id is not None:
            settings["bos_token_id"] = config.decoder_start_token_id
    for size in ("layers", "attention_heads", "ffn_dim"):
        settings |= _both(**{size: getattr(config, f"{side}_{size}")})
    if all(getattr(config, name) == value for name, value in settings.items()):
        return config
    single = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(single, name, value)
    return single


# Where the Trainer looks up whether labels are shifted when it smooths them, its model cards the task, and lm-eval
# the kind of model. What is registered with an Auto class, or found by its auto_map, they do not ask.
for _auto_class, _names in _TABLES.items():
    _place = {**AUTO_MAP, **_ENCODER_AUTO_MAP, **_DECODER_AUTO_MAP}[_auto_class]
    _names[VanillaTransformerConfig.model_type] = _place.partition(".")[2]
