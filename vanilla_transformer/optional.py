"""Packages that need not be there: what to say where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explain_missing(reason: str, *, extra: str, packages: str) -> Iterator[None]:
    """Lets an import that fails say how to install what it needs.

    Args:
        reason: The message's beginning: "BLEU, chrF and TER need sacrebleu".
        extra: The extra of this package that brings it.
        packages: What pip calls it.

    Raises:
        ImportError: If what is done inside raises one.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f'{reason}: pip install "vanilla-transformer[{extra}]" (or pip install {packages}).'
        ) from error
