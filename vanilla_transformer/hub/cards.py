"""The card that a push brings: built from the folder, with what users wrote into the folder's and into the Hub's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard

from .card import build_model_card, merge_edited_cards, merge_model_card, says_the_same
from .files import CARD_NAME, Problem, join_lines, read_text

CardChoice = Literal["folder", "hub"]


@dataclass(frozen=True)
class PushedCard:
    """A card to push.

    Args:
        text: All of it.
        problems: Why it must not be pushed yet.
        backup: The name under which the folder keeps its card, if that has text of its user's which this one lacks.
    """

    text: str
    problems: list[Problem]
    backup: str | None


def make_card(
    folder: Path,
    repo_id: str,
    *,
    there: str | None,
    pushed: Mapping[str, Any],
    key: str,
    choice: CardChoice | None,
    **metadata: Any,
) -> PushedCard:
    """Builds a folder's card, with the edits of the one in the folder and of the one on the Hub.

    Args:
        folder: The model's folder.
        repo_id: Where it is pushed to.
        there: The card on the Hub.
        pushed: The cards that were pushed from the folder to branches of this repository.
        key: The branch's name in it.
        choice: Whose edits count where both edited the same. Default: that is a problem.
        **metadata: As of `build_model_card`.

    Returns:
        The card.

    Raises:
        Exception: If a file of the folder, or a card, is damaged.
    """
    generated = build_model_card(folder, repo_id=repo_id, **metadata)
    here = read_text(folder / CARD_NAME) if (folder / CARD_NAME).is_file() else None
    one = _parse(here, "in the folder", "hub", choice)
    other = _parse(there, "on the Hub", "folder", choice)
    # What is on the Hub came from here, possibly by way of another branch, or was edited there since.
    origin = next((text for text in pushed.values() if text == there), pushed.get(key))
    base = ModelCard(origin) if isinstance(origin, str) and "\n" in origin else None
    conflicts: list[str] = []
    if one is not None and other is not None:
        prefer: Literal["here", "there"] = "there" if choice == "hub" else "here"
        merged, conflicts = merge_edited_cards(one, other, generated, base=base, prefer=prefer)
    else:
        merged = merge_model_card(one or other or generated, generated)
    if says_the_same(merged, generated):
        merged = generated
    kept = [card.content for card in (merged, generated, base) if card is not None]
    written = here if one is None else merge_model_card(one, generated).content
    is_lost = written is not None and not _lines([written]) <= _lines(kept)
    return PushedCard(
        text=merged.content,
        problems=[] if choice else list(_describe_conflicts(conflicts)),
        backup=_free_name(folder) if is_lost else None,
    )


def _parse(text: str | None, where: str, other: CardChoice, choice: CardChoice | None) -> ModelCard | None:
    """A card, or `None` if it is damaged but the other one was chosen."""
    try:
        return None if text is None else ModelCard(text)
    except Exception as error:  # besides ValueError, YAML's own
        if choice == other:
            return None
        raise ValueError(
            f"the one {where} cannot be read: {join_lines(error)} Mend it, or take the other one with --card {other}."
        ) from error


def _describe_conflicts(conflicts: Iterable[str]) -> Iterable[Problem]:
    if places := ", ".join(dict.fromkeys(conflicts)):
        yield Problem(
            "card",
            f"{CARD_NAME} was edited both in the folder and on the Hub, at the same place: {places}. Choose whose "
            "edits count there with --card folder or --card hub; all others are kept.",
        )


def _lines(texts: Iterable[str]) -> set[str]:
    """Those that are not comments, which hold the records of a card's making."""
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return {line for line in lines if not (line.startswith("<!--") and line.endswith("-->"))}


def _free_name(folder: Path) -> str:
    names = (f"{CARD_NAME}.bak-{number}" for number in range(1, 10_000))
    return next(name for name in names if not (folder / name).exists())
