"""Packages for Argos Translate and LibreTranslate: models in CTranslate2's form that they install from a file.

argostranslate (1.11) splits a text at line ends and into sentences, cuts these by the package's sentencepiece model,
and translates with beam 4 (`ARGOS_BEAM_SIZE`) and a length penalty of 0.2, whatever the model's own settings are.
Translations are those of `CTranslate2Model` with this search, except that

- special tokens that a text spells out ("</s>") are text;
- an unknown token of a translation becomes the word of the source that it looks at;
- argostranslate writes each "_" of a translation as a space.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.data.vocabularies import get_vocabularies, load_tokenizer
from vanilla_transformer.files import check_new_folder, new_folder
from vanilla_transformer.hub.words import name_language
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.tasks import find_prefix, find_task

from .ctranslate2 import export_ctranslate2

ARGOS_VERSION = "1.9.0"  # what a package says that it is for; later versions take it too
_NAMES = {"pb": "Portuguese (Brazil)", "zt": "Chinese (traditional)"}  # Argos' own codes
_README = """# {from_name} to {to_name}

A package for Argos Translate and LibreTranslate, version {package_version}, made with vanilla-transformer.
"""


def export_argos(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    package_version: str = "1.0",
    sentence_splitter: str | os.PathLike[str] | None = None,
    quantization: str | None = None,
    max_positions: int | None = None,
) -> Path:
    """Writes a package, `translate-en_de-1_0.argosmodel` say, into a folder that is complete or absent.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer, made from sentencepiece models, or a `MarianTokenizer`; `None`: the one saved
            with the model.
        source_lang: Code of the source language, as Argos Translate has it: ISO 639's, or "zt" (traditional Chinese),
            "pb" (Brazilian Portuguese). `None`: the model's own.
        target_lang: The same of the target language.
        package_version: The package's version: numbers, and dots between them.
        sentence_splitter: A model of MiniSBD (.onnx) for the source language, which goes into the package. `None`:
            argostranslate fetches one from the network when it first translates.
        quantization: As in `export_ctranslate2`.
        max_positions: As in `export_ctranslate2`.

    Raises:
        ConversionError: If it cannot be a package; lists all reasons.
        FileExistsError: If there is something already.
    """
    check_new_folder(folder)
    loaded: Any = model
    if isinstance(model, str | os.PathLike):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    langs = getattr(loaded.config, "langs", None) or ()
    codes = [source_lang, target_lang]
    if len(langs) == 2:
        codes = [given or own for given, own in zip(codes, langs, strict=True)]
    splitter = None if sentence_splitter is None else Path(sentence_splitter)
    reasons = [*_find_reasons(loaded, tokenizer), *_find_wrong_settings(codes, package_version, splitter)]
    refuse("The model cannot be a package of Argos Translate", reasons)
    source, target = map(str, codes)
    names = [_NAMES.get(code) or name_language(code) for code in (source, target)]
    metadata = {"package_version": package_version, "argos_version": ARGOS_VERSION}
    metadata |= {"from_code": source, "from_name": names[0], "to_code": target, "to_name": names[1]}
    name = f"translate-{source}_{target}-{package_version.replace('.', '_')}"
    with new_folder(folder) as partial:
        package = partial / name
        options: dict[str, Any] = {"quantization": quantization, "max_positions": max_positions}
        exported = export_ctranslate2(_forbid(loaded), partial / "exported", tokenizer=tokenizer, **options)
        _pack_model(exported, package / "model", tokenizer)
        (package / "sentencepiece.model").write_bytes(cast(bytes, _read_sentencepiece_model(tokenizer)))
        (package / "metadata.json").write_text(json.dumps(metadata, indent=4, ensure_ascii=False), encoding="utf-8")
        (package / "README.md").write_text(_README.format(**metadata), encoding="utf-8")
        if splitter is not None:
            (package / "minisbd").mkdir()
            shutil.copyfile(splitter, package / "minisbd" / splitter.name)
        archive = shutil.make_archive(str(partial / "archive"), "zip", root_dir=partial, base_dir=name)
        Path(archive).rename(partial / f"{name}.argosmodel")
        for each in (package, exported):
            shutil.rmtree(each)
    return Path(folder)


def _find_reasons(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    """Yields why what argostranslate does to a text would not be what this model's tokenizer does."""
    if tokenizer is None or _read_sentencepiece_model(tokenizer) is None:
        kind = "no tokenizer" if tokenizer is None else f"a {type(tokenizer).__name__}"
        yield (
            f"it has {kind} that was not made from a sentencepiece model, the only kind that Argos Translate knows "
            "(train it with --tokenizer_name spm.model, where spm.model is what sentencepiece's spm_train writes)"
        )
        return
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
    if added:
        yield f"{len(added):,} tokens that sentencepiece does not know were added to its tokenizer, first {added[0]!r}"
    known, written = get_vocabularies(tokenizer)
    if "<0x00>" in written and "<0x00>" not in known:
        yield "its target's sentencepiece model spells characters in bytes, and the source's, which is packed, does not"
    if codes := getattr(tokenizer, "supported_language_codes", None):
        yield f"it wants one of {', '.join(codes)} before each source, which Argos Translate does not put there"
    if len(find_directions(model.config)) > 1:
        yield "it translates several pairs of languages, and a package is for one"
    elif prefix := find_prefix(model.config, find_task(model.config), langs=getattr(model.config, "langs", None)):
        yield f"it wants {prefix!r} before each source, which Argos Translate does not put there"

    if _list_forbidden(model) and not model.config.lm_head_bias:
        yield "its search forbids tokens, which a package can do with lm_head_bias=True alone"


def _read_sentencepiece_model(tokenizer: Any) -> bytes | None:
    """The content of the source's model."""
    if hasattr(tokenizer, "spm_files"):  # MarianTokenizer
        return Path(tokenizer.spm_files[0]).read_bytes()
    return getattr(tokenizer, "sentencepiece_model", None)


def _list_forbidden(model: Any) -> list[int]:
    """The tokens that the model's own search never writes, such as the padding of opus-mt."""
    settings = model.generation_config
    return [*(ids[0] for ids in settings.bad_words_ids or [] if len(ids) == 1), *(settings.suppress_tokens or [])]


def _forbid(model: Any) -> Any:
    """The model, or a copy that never writes what its own search forbids, since argostranslate forbids nothing."""
    forbidden = _list_forbidden(model)
    if not forbidden:
        return model
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.bias[forbidden] = torch.finfo(torch.float16).min
    return model


def _find_wrong_settings(codes: list[str | None], package_version: str, splitter: Path | None) -> Iterator[str]:
    for name, code in zip(("source_lang", "target_lang"), codes, strict=True):
        if code is None or not re.fullmatch("[a-z]{2,3}", code):
            yield f"{name} is {code!r} (can be: a code of ISO 639 such as 'en')"
    if not re.fullmatch(r"\d+(\.\d+)*", package_version):
        yield f"package_version is {package_version!r} (can be: numbers and dots, such as '1.0')"
    if splitter is not None and (splitter.suffix != ".onnx" or not splitter.is_file()):
        yield f"sentence_splitter is {str(splitter)!r} (can be: an .onnx file of MiniSBD)"


def _pack_model(exported: Path, folder: Path, tokenizer: Any) -> None:
    """Takes what CTranslate2 itself reads, and has it add the special tokens that the tokenizer adds to sources."""
    folder.mkdir(parents=True)
    for file in (exported / "model.bin", *exported.glob("*_vocabulary.json")):
        file.rename(folder / file.name)
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    added = tokenizer("")["input_ids"]
    ends = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    config |= {f"add_source_{name}": index in added for name, index in ends.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
