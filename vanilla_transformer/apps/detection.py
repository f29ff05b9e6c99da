"""Which language a text is in, of those that a server knows."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vanilla_transformer.files import explain_missing

from .texts import find_iso_code

_CHARACTERS = 2000  # of a text that are looked at


class Detection(NamedTuple):
    """A language as the server spells it, and how sure it is, in percent."""

    language: str
    confidence: float


# The languages of a text, the likeliest first.
Detector = Callable[[str], list[Detection]]


def load_lingua(languages: Iterable[str]) -> Detector:
    """Makes a detector of `lingua-language-detector`, which brings its data with it.

    It chooses among the languages; confidences sum up to 100, or are 0 for a text in none of their scripts.

    Raises:
        ValueError: If it knows less than two of the languages.
    """
    with explain_missing("Detecting languages needs lingua", extra="serve", packages="lingua-language-detector"):
        import lingua

    names: dict[Any, str] = {}
    for language in languages:
        known = getattr(lingua.IsoCode639_1, find_iso_code(language).upper(), None)
        if known is not None:
            names.setdefault(known, language)
    if len(names) < 2:
        found = ", ".join(names.values()) or "none"
        raise ValueError(f"--language_detector lingua needs two languages that it knows; of those served: {found}.")
    builder = lingua.LanguageDetectorBuilder.from_iso_codes_639_1(*names)
    detector = builder.with_preloaded_language_models().build()

    def detect(text: str) -> list[Detection]:
        found = detector.compute_language_confidence_values(text[:_CHARACTERS])
        return [Detection(names[each.language.iso_code_639_1], round(100 * each.value, 1)) for each in found]

    return detect


DETECTORS: dict[str, Callable[[Iterable[str]], Detector]] = {"lingua": load_lingua}
