"""FSMT, in transformers the class of the wmt19 models, which are fairseq's: into this package's form.

FSMT takes its positions from the ids rather than from the mask, and hides the padding token in the decoder's input
wherever it stands. A padding token that is *generated*, which trained models do not do, changes what follows. Its loss
counts padding among the labels.
Older versions of transformers (5.12 is one) give every token that it decodes with its cache the first position.
"""

from dataclasses import replace

from transformers import FSMTConfig, FSMTForConditionalGeneration, FSMTTokenizer

from vanilla_transformer.conversion.converted import ConvertedModel
from vanilla_transformer.conversion.errors import find_differences
from vanilla_transformer.conversion.weights import Rule, make_config

from .library import (
    IGNORED_FIELDS,
    LibraryModel,
    check_tokenizer,
    convert_loaded,
    make_rules,
    read_common_fields,
)


def convert_fsmt(name_or_path: str, *, revision: str = "main") -> ConvertedModel:
    """Converts an FSMT model: the same function, settings for `generate` and tokenizer, and the same type.

    Args:
        name_or_path: A folder that transformers can load, or a name on the Hub such as "facebook/wmt19-en-de".
        revision: Branch, tag or commit on the Hub.
    """
    place = LibraryModel("FSMT", name_or_path, revision)
    fsmt_config: FSMTConfig = place.read_config(FSMTConfig)
    tokenizer = place.load_tokenizer(("vocab-src.json", "vocab-tgt.json", "merges.txt"))
    obstacles = find_differences(fsmt_config, IGNORED_FIELDS)
    if fsmt_config.pad_token_id is None:
        obstacles.append("pad_token_id is None (can be: any token; FSMT's positions begin behind it)")
    is_tied = fsmt_config.tie_word_embeddings  # all three tables, or none
    config = make_config(
        place.source,
        obstacles,
        **read_common_fields(fsmt_config),
        vocab_size=fsmt_config.src_vocab_size,
        decoder_vocab_size=fsmt_config.tgt_vocab_size,
        share_encoder_decoder_embeddings=is_tied,
        tie_word_embeddings=is_tied,
        position_embedding_type="sinusoidal_tensor2tensor",
        position_offset=(fsmt_config.pad_token_id or 0) + 1,
        attention_bias=True,
        langs=list(fsmt_config.langs),
    )
    if isinstance(tokenizer, FSMTTokenizer):
        check_tokenizer(tokenizer, config, place.source)
    fsmt = place.load(FSMTForConditionalGeneration, r"embed_positions\.weight")
    output_rule = Rule(r"model\.decoder\.output_projection\.weight", "lm_head.weight")
    converted = convert_loaded(place, fsmt, config, (*make_rules(config), output_rule), tokenizer)
    if not isinstance(tokenizer, FSMTTokenizer):
        return converted
    note = (
        "FSMTTokenizer encodes texts given as text_target with the source's vocabulary, so that they can be no labels: "
        "the model translates, but a loss needs another tokenizer."
    )
    return replace(converted, notes=(*converted.notes, note))
