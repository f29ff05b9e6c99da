"""MarianMT, in transformers the class of all opus-mt models: into this package's form, and out of it.

With padding on the left MarianMT counts it among the positions; this package's model does not. MarianMT's positions end
with its table (`max_position_embeddings`); this package's go on.
"""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vanilla_transformer.conversion.converted import Batch, ConvertedModel, as_float32, check_counterpart
from vanilla_transformer.conversion.errors import (
    find_differences,
    find_excess_tokens,
    find_strange_weights,
    list_head_sizes,
    refuse,
)
from vanilla_transformer.conversion.weights import Rule, make_config, rename_weights
from vanilla_transformer.files import new_folder
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .library import (
    IGNORED_FIELDS,
    LibraryModel,
    check_tokenizer,
    convert_loaded,
    make_rules,
    read_common_fields,
    take_generation_config,
)

logger = logging.getLogger(__name__)


def convert_marian(name_or_path: str, *, revision: str = "main") -> ConvertedModel:
    """Converts a MarianMT model: the same function, settings for `generate` and tokenizer, and the same type.

    Args:
        name_or_path: A folder that transformers can load, or a name on the Hub such as "Helsinki-NLP/opus-mt-en-de".
        revision: Branch, tag or commit on the Hub.
    """
    place = LibraryModel("MarianMT", name_or_path, revision)
    marian_config: MarianConfig = place.read_config(MarianConfig)
    tokenizer = place.load_tokenizer(("source.spm", "target.spm", "vocab.json"))
    # Without tied weights Marian's encoder and decoder have a table each, whatever the other flag says.
    is_shared = marian_config.share_encoder_decoder_embeddings and marian_config.tie_word_embeddings
    config = make_config(
        place.source,
        find_differences(marian_config, IGNORED_FIELDS),
        **read_common_fields(marian_config),
        vocab_size=marian_config.vocab_size,
        decoder_vocab_size=None if is_shared else marian_config.decoder_vocab_size,
        share_encoder_decoder_embeddings=is_shared,
        tie_word_embeddings=marian_config.tie_word_embeddings,
        position_embedding_type="sinusoidal_concatenated",
        attention_bias=True,
        lm_head_bias=True,
        langs=_find_languages(tokenizer),
    )
    if tokenizer is not None:
        check_tokenizer(tokenizer, config, place.source)
    marian = place.load(MarianMTModel, r"embed_positions\.weight|final_logits_bias")
    rules = (
        *make_rules(config),
        Rule(r"model\.shared\.weight", "model.shared.weight" if is_shared else ()),
        Rule(r"lm_head\.weight", "lm_head.weight"),
        Rule(r"final_logits_bias", "lm_head.bias", change=torch.flatten),
    )
    return convert_loaded(place, marian, config, rules, tokenizer)


def _find_languages(tokenizer: PreTrainedTokenizerBase | None) -> list[str] | None:
    found = [getattr(tokenizer, f"{side}_lang", None) for side in ("source", "target")]
    langs = [lang for lang in found if isinstance(lang, str) and lang.strip()]
    return langs if len(langs) == 2 else None


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """Makes MarianMT the same function as a model of this package.

    Marian has all sines of the positions before all cosines. Where the model interleaves them, as the paper does, the
    dimensions of everything between the sub-layers are put in Marian's order: the columns of what reads from there
    (embeddings, queries, keys, values, first feed-forward matrix), the rows of what writes there, and the norms. Biases
    that the model lacks are zeros in Marian.

    Of the settings for `generate`, `length_penalty_type` is left out, with a warning. Where the model would limit
    translations by the source's length, Marian gets a `max_length` as long as its table of positions.

    The model must have post-LN, sinusoids from position 0, and heads that divide d_model; a `ConversionError` names all
    reasons against it. MarianMT is in evaluation mode, with the same dtype, on the same device.
    """
    config = model.config
    wanted: dict[str, tuple[object, ...]] = {
        "position_embedding_type": ("sinusoidal", "sinusoidal_concatenated"),
        "position_offset": (0,),
        **dict.fromkeys(("normalize_before", "normalize_embedding"), (False,)),
        "add_final_layer_norm": (None, False),
        "layer_norm_eps": (1e-5,),
        "ffn_bias": (True,),
        **dict.fromkeys(("d_k", "d_v"), list_head_sizes(config)),
    }
    obstacles = find_differences(config, wanted)
    if config.decoder_start_token_id is None:
        obstacles.append("decoder_start_token_id is None (can be: any token)")
    refuse("MarianMT has no counterpart of this model", [*obstacles, *find_strange_weights(model)])
    marian = _make_counterpart(model)
    own = marian.state_dict()
    tables = {name: tensor for name, tensor in own.items() if name.endswith("embed_positions.weight")}
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    if not config.lm_head_bias:
        weights["lm_head.bias"] = torch.zeros(config.target_vocab_size)
    if not config.attention_bias:
        weights |= {name: torch.zeros_like(tensor) for name, tensor in own.items() if name.endswith("_proj.bias")}
    order = torch.arange(config.d_model)
    if config.position_embedding_type == "sinusoidal":
        order = torch.cat([order[0::2], order[1::2]])
    rules = (
        Rule(r"lm_head\.bias", "final_logits_bias", change=lambda tensor: tensor[None]),
        Rule(r"(model\..+\.(?:[qkv]_proj|fc1)\.bias)", r"\1"),
        Rule(r"(model\..+\.(?:out_proj|fc2)\.(?:weight|bias))", r"\1", change=lambda tensor: tensor[order]),
        Rule(r"(model\..+|lm_head\.weight)", r"\1", change=lambda tensor: tensor[..., order]),
    )
    shapes = {name: tensor.shape for name, tensor in own.items() if name not in tables}
    marian.load_state_dict(rename_weights(weights, rules, shapes, source="this model") | tables)
    return cast(Any, marian).to(device=model.device, dtype=model.dtype).eval()


def _make_counterpart(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """MarianMT with the same settings, and weights of its own."""
    config, generation_config = model.config, take_generation_config(model)
    length_penalty_type = vars(generation_config).pop("length_penalty_type", None)
    if length_penalty_type not in (None, "transformers"):
        message = "length_penalty_type=%r is left out: MarianMT, without it, may choose other translations."
        logger.warning(message, length_penalty_type)
    max_length, max_new_tokens = generation_config.max_length, generation_config.max_new_tokens
    rows = max(config.max_position_embeddings, max_length or 0, max_new_tokens or 0)
    if max_length is None and max_new_tokens is None:
        generation_config.max_length = rows
    sharing = ("share_encoder_decoder_embeddings", "tie_word_embeddings")
    settings: dict[str, Any] = {name: getattr(config, name) for name in ("vocab_size", *sharing)}
    settings |= read_common_fields(config) | {
        "decoder_vocab_size": config.target_vocab_size,
        "max_position_embeddings": rows,
    }
    settings |= {"forced_eos_token_id": generation_config.forced_eos_token_id}
    marian = MarianMTModel(MarianConfig(**settings))
    marian.generation_config = generation_config
    return marian


def save_as_marian(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | os.PathLike[str],
    *,
    check: bool = True,
) -> Path:
    """Saves a model as MarianMT (see [`to_marian`]), for those who have transformers and not this package.

    A tokenizer of this package that was made from sentencepiece models is saved as a `MarianTokenizer` of these, any
    other of this package's as `PreTrainedTokenizerFast`, others as they are; a `ConversionError` if the library has no
    such tokenizer. The folder is complete or absent; where there is something already, it is a
    `FileExistsError`. With `check`, logits of a random batch are compared before anything is saved.
    """
    reasons = find_excess_tokens(tokenizer, model.config)
    own = tokenizer if isinstance(tokenizer, VanillaTransformerTokenizer) else None
    is_marians = own is not None and _is_marians(own)
    if own is not None and own.separate_vocabs and not is_marians:
        reasons.append("it has two vocabularies (separate_vocabs=True), and the library's fast tokenizers have one")
    refuse("The tokenizer cannot be saved for use without this package", reasons)
    with new_folder(folder) as partial:
        marian = to_marian(model)

        def compute(batch: Batch) -> torch.Tensor:
            return cast(torch.Tensor, as_float32(marian)(**batch, use_cache=False).logits)

        if check:
            check_counterpart(compute, model, "MarianMT")
        marian.save_pretrained(partial)
        if own is not None and is_marians:
            _save_marian_tokenizer(own, partial, getattr(model.config, "langs", None))
        elif tokenizer is not None:
            tokenizer.save_pretrained(partial)
            if own is not None:
                _make_plain(partial)
                refuse("The tokenizer cannot be saved for use without this package", _find_misspelt(own, partial))
    return Path(folder)


def _is_marians(tokenizer: VanillaTransformerTokenizer) -> bool:
    """Whether sentencepiece models and vocabularies are all that there is to a tokenizer."""
    named = {str(token) for token in tokenizer._special_tokens_map.values() if token is not None}
    sides = (tokenizer.source_tokenizer, tokenizer.target_tokenizer)
    added = {token.content for side in sides for token in side.added_tokens_decoder.values()}
    is_made_so = all(side.sentencepiece_model is not None for side in sides)
    return is_made_so and added <= named and tokenizer.add_eos_token and not tokenizer.add_bos_token


def _save_marian_tokenizer(tokenizer: VanillaTransformerTokenizer, folder: Path, langs: list[str] | None) -> None:
    from transformers import MarianTokenizer  # it needs sentencepiece

    sides = (tokenizer.source_tokenizer, tokenizer.target_tokenizer)
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json")]
        for file, side in zip(files[:2], sides, strict=True):
            file.write_bytes(cast(bytes, side.sentencepiece_model))
        for file, side in zip(files[2:], sides, strict=True):
            file.write_text(json.dumps(side.get_vocab()), encoding="utf-8")
        source_lang, target_lang = langs if langs is not None and len(langs) == 2 else (None, None)
        marian = MarianTokenizer(
            source_spm=str(files[0]),
            target_spm=str(files[1]),
            vocab=cast(Any, str(files[2])),
            target_vocab_file=str(files[3]) if tokenizer.separate_vocabs else None,
            separate_vocabs=tokenizer.separate_vocabs,
            source_lang=source_lang,
            target_lang=target_lang,
            unk_token=tokenizer.unk_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            model_max_length=tokenizer.model_max_length,
        )
        marian.save_pretrained(folder)


def _make_plain(folder: Path) -> None:
    """Makes the library's own class read a saved tokenizer of this package: `tokenizer.json` holds all it needs."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("auto_map", None)
    # The name that transformers 4 knows too.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for module in folder.glob("*_vanilla_transformer.py"):
        module.unlink()


def _find_misspelt(tokenizer: VanillaTransformerTokenizer, folder: Path) -> list[str]:
    """Returns a reason for each added token that the library's own class, as it is in the folder, writes otherwise."""
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if not token.special}
    written = {number: plain.decode([number]) for number in added}
    return [
        f"its added token {token!r} would be written as {written[number]!r}"
        for number, token in added.items()
        if written[number] != tokenizer.decode([number])
    ]
