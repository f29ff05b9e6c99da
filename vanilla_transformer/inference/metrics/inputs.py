"""Checks of what is scored: texts, and one or several references for each of them."""

from collections.abc import Sequence
from typing import Any


def list_references(reference: Any) -> list[str]:
    """Makes a list of what was given as the reference, or references, of one text.

    Args:
        reference: A string or several.

    Returns:
        At least one string.

    Raises:
        TypeError: If it is anything else.
        ValueError: If there is none.
    """
    if isinstance(reference, str):
        return [reference]
    if not isinstance(reference, Sequence) or not all(isinstance(text, str) for text in reference):
        raise TypeError(f"A reference is {reference!r}; it must be a string or a list of strings.")
    if not reference:
        raise ValueError("A prediction has an empty list of references; each must have at least one.")
    return list(reference)


def list_all_references(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """Makes sure that there is something to score, and lists the references of each text.

    Args:
        predictions: Texts.
        references: For each of them its reference, or a list of them.

    Returns:
        At least one string for each text.

    Raises:
        TypeError: If predictions or references are a single string, or a reference is no string.
        ValueError: If there is nothing to score, predictions and references differ in number, or a text has none.
    """
    if isinstance(predictions, str) or isinstance(references, str):
        raise TypeError("predictions and references are lists, one of them is a single string.")
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} predictions and {len(references)} references; there must be as many of one as of the "
            "other, and at least one."
        )
    return [list_references(reference) for reference in references]
