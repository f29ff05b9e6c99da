"""Languages and scripts: which language a text is in, of those that a server knows, or that a corpus should have."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from vanilla_transformer.files import explain_missing

# Characters of the scripts that put no space between words, for a class of a regular expression: Thai, Lao, Burmese,
# Khmer, kana, Han.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_CHARACTERS = 2000  # of a text that are looked at


class Detection(NamedTuple):
    """A language, spelled as it was asked for, and how sure the detector is, in percent."""

    language: str
    confidence: float


# The languages of a text, the likeliest first.
Detector = Callable[[str], list[Detection]]


def find_iso_code(language: str) -> str:
    """The code of two letters, where there is one: "de" of "de_DE", "deu" and "deu_Latn"."""
    from babel.core import get_global

    base = re.split("[-_]", language)[0].lower()
    alias = re.split("[-_]", get_global("language_aliases").get(base, base))[0]
    return alias if len(alias) == 2 or len(base) != 2 else base


def is_known_to_lingua(language: str) -> bool:
    """Whether lingua can tell the language from others."""
    with _explain():
        import lingua

        return hasattr(lingua.IsoCode639_1, find_iso_code(language).upper())


def _explain() -> AbstractContextManager[None]:
    packages = "lingua-language-detector Babel"
    return explain_missing("Detecting languages needs lingua and Babel", extra="clean", packages=packages)


def load_lingua(languages: Iterable[str], *, among_all: bool = False, low_accuracy: bool = False) -> Detector:
    """Makes a detector of `lingua-language-detector`, which brings its data with it.

    It chooses among the languages, or `among_all` that lingua knows; confidences sum up to 100, or are 0 for a text in
    none of their scripts. `low_accuracy` looks at groups of three letters alone, and needs less memory.

    Raises:
        ValueError: If it knows less than two of the languages.
    """
    with _explain():
        import lingua

        codes = {language: find_iso_code(language).upper() for language in languages}
    names: dict[Any, str] = {}
    for language, code in codes.items():
        known = getattr(lingua.IsoCode639_1, code, None)
        if known is not None:
            names.setdefault(known, language)
    if len(names) < 2:
        found = ", ".join(names.values()) or "none"
        raise ValueError(f"The language detector lingua needs two languages that it knows; of those given: {found}.")
    if among_all:
        builder = lingua.LanguageDetectorBuilder.from_all_languages()
    else:
        builder = lingua.LanguageDetectorBuilder.from_iso_codes_639_1(*names).with_preloaded_language_models()
    detector = (builder.with_low_accuracy_mode() if low_accuracy else builder).build()

    def detect(text: str) -> list[Detection]:
        found = detector.compute_language_confidence_values(text[:_CHARACTERS])
        codes = [(each.language.iso_code_639_1, round(100 * each.value, 1)) for each in found]
        return [Detection(names.get(code, code.name.lower()), confidence) for code, confidence in codes]

    return detect


DETECTORS: dict[str, Callable[[Iterable[str]], Detector]] = {"lingua": load_lingua}
