"""Model cards: the README.md of a trained model's folder, filled in from what its training left there.

A card says nothing that the folder's files do not: what they leave open is "not recorded". Each part of a generated
card stands between comments with a digest of its text, so that a card that is made again replaces the parts that nobody
has touched, and leaves alone what somebody wrote, changed or deleted.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FunctionLoader

from vanilla_transformer.files import replacing_files

from .facts import ModelFolder, identify_result, is_hub_name
from .single_stack_card import read_model_folder
from .words import escape

CARD_FILE = "README.md"

# The one of a half is the whole's, with other words in its blocks.
_TEMPLATES = Environment(
    loader=FunctionLoader(lambda name: resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
)
# Metadata that several may add to.
_ADDED = ("datasets", "tags")
_RELATION = "base_model_relation"
_SECTION = re.compile(
    r"<!-- generated: (?P<name>[a-z]+) (?P<digest>[0-9a-f]+) -->\r?\n(?P<content>.*?)\r?\n<!-- end: (?P=name) -->",
    re.DOTALL,
)
_SECTION_START = re.compile(r"<!-- generated: ([a-z]+) [0-9a-f]+ -->")
_RECORD_NOTE = "What stands between such comments is written anew with the card, unless you change or delete it."
_RECORD = re.compile(rf"<!-- {re.escape(_RECORD_NOTE)} (\{{[^\r\n]*\}}) -->")


class CardMetadata(TypedDict, total=False):
    """What a user can say about a model that its files do not."""

    license: str | None
    datasets: str | list[str] | None
    tags: str | list[str] | None
    language: str | list[str] | None
    model_name: str | None
    base_model: str | None


def build_model_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    datasets: str | list[str] | None = None,
    tags: str | list[str] | None = None,
    language: str | list[str] | None = None,
    model_name: str | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Makes the card of a model from the files in its folder, which must be one that `save_pretrained` wrote.

    The configuration tells what the model is for; a half is called one, and used by its own Auto class and task.

    What `scripts/train.py` leaves there tells of the training, and sub-folders that `scripts/evaluate_translation.py
    --output_dir` made bring scores and examples. Scores that belong to other weights, as of a checkpoint, are left out.
    Of local paths only the last part is told.

    Args:
        folder: The model's folder. Nothing is written to it.
        repo_id: The model's name on the Hub, `"user/name"`; without it the card names the folder.
        license: The license's identifier, `"apache-2.0"`; without it the card says that none was given.
        datasets: Datasets of the Hub that it was trained on, besides the one that the training recorded.
        tags: More tags.
        language: Codes of its languages, in place of those in the configuration.
        model_name: Title; by default the last part of `repo_id`, or else the folder's name.
        base_model: The model on the Hub whose training was continued, where the folder's records do not name it.
        revision: The branch that holds the model, if the main one does not; the examples of use name it.
        config: The configuration, if it will not be what config.json holds now.

    Returns:
        The card.

    Raises:
        FileNotFoundError: If the folder has no config.json.
        ValueError: If a file is damaged; the message names it. If `base_model` is no name of the Hub, a path say.
    """
    _check_base_model(base_model)
    found = read_model_folder(Path(folder), repo_id, revision=revision, config=config, base_model=base_model)
    name = model_name or (repo_id or found.name).rpartition("/")[-1]
    given = {
        "license": license,
        "datasets": datasets,
        "tags": tags,
        "language": language,
        "model_name": model_name,
        "base_model": base_model,
    }
    metadata = found.metadata(name)
    for key, value in given.items():
        if value is not None:
            metadata[key] = _add(metadata.get(key), value) if key in _ADDED else value
    if not metadata["eval_results"]:
        metadata["model_name"] = None  # a part of the model-index
    card, sections = _render(found, ModelCardData(**metadata), name)
    entries = _entries(card.data)
    derived = {key: _digest(_comparable(value)) for key, value in entries.items() if given.get(key) is None}
    if _RELATION in entries:
        derived[_RELATION] = _digest_relation(entries[_RELATION], entries["base_model"])
    card.text = f"{card.text.rstrip()}\n\n{_Record(sections, derived)}\n"
    return card


def _check_base_model(name: str | None) -> None:
    if name is not None and not is_hub_name(name):
        reason = ", which is a path here" if os.path.exists(name) else ""
        raise ValueError(f"base_model must be a model's name on the Hub, 'me/my-model' say, not {name!r}{reason}.")


def _render(found: ModelFolder, data: ModelCardData, title: str) -> tuple[ModelCard, list[str]]:
    """Fills the template in, and returns the names of its sections too."""
    sections: list[str] = []

    def section(name: str, caller: Callable[[], str]) -> str:
        sections.append(name)
        return _enclose(name, caller().strip())

    content = _TEMPLATES.get_template(found.template).render(
        **{**data.to_dict(), **found.facts()}, card_data=data.to_yaml(), section=section, title=escape(title)
    )
    return ModelCard(content), sections


def merge_model_card(existing: ModelCard, generated: ModelCard) -> ModelCard:
    """Brings a card up to date without touching what its user wrote.

    * Sections of the text that are as they were generated are replaced; changed ones and all other text stay, deleted
      ones stay deleted. A card in which nothing was generated keeps its text whole, unless it has none.
    * Metadata are added, and replaced where they are as they were generated; what the user set, changed or removed
      stays so. So do the results in the `model-index`, each by itself. What we say of the relation to the base model
      is said of that one only, and goes with it.
    * What was given as an argument to `build_model_card` is the user's latest word and wins; tags and datasets are
      added to those that are there.

    Args:
        existing: The card so far.
        generated: What `build_model_card` returned now.

    Returns:
        A new card. Merging the same card into it again changes nothing.
    """
    old, new = _Record.find(existing.text), _Record.find(generated.text)
    entries, metadata_record = _merge_entries(
        _entries(existing.data),
        _entries(generated.data),
        old=None if old is None else old.metadata,
        new=None if new is None else new.metadata,
    )
    generated_text = generated.text
    if entries.get("license") and not generated.data.get("license"):
        # It says that there is none.
        generated_text = _remove_section(generated_text, "license")
    merged = ModelCard(existing.content)
    merged.data = _card_data(entries, existing.data, generated.data)
    merged.text = _merge_text(existing.text, generated_text, old=old, metadata=metadata_record)
    # Read again, for the results of one test set share its name once they are written.
    return ModelCard(merged.content)


def merge_edited_cards(
    here: ModelCard,
    there: ModelCard,
    generated: ModelCard,
    *,
    base: ModelCard | None = None,
    prefer: Literal["here", "there"] = "here",
) -> tuple[ModelCard, list[str]]:
    """Brings two cards of one model up to date, as `merge_model_card` does, with what was edited in either.

    Edits of different sections, of text at different places between them, and of different metadata are all kept.

    Args:
        here: A card.
        there: Another one.
        generated: What `build_model_card` returned now.
        base: The card that both were made from by editing. Default: a generated one.
        prefer: Whose edits are taken where both were edited in different ways.

    Returns:
        The card, and the places where that was so, in words.
    """
    one, other, origin = (merge_model_card(card, generated) for card in (here, there, base or generated))
    merging = _Merging(prefer)
    sides = [_entries(card.data) for card in (origin, one, other)]
    keys = dict.fromkeys([*sides[1], *sides[2]])  # in their order
    merged_values = {key: merging.merge_values(key, *sides) for key in keys}
    entries = {key: value for key, value in merged_values.items() if value is not None}
    atoms = merging.merge_atoms(*(_split(card.text) for card in (origin, one, other)))
    text = "".join(atom.text for atom in atoms)
    records = [record for card in (one, other) if (record := _Record.find(card.text)) is not None]
    digests = {key: digest for record in reversed(records) for key, digest in record.metadata.items()}
    _settle_relation(entries, digests, existing=entries, generated=_entries(generated.data), before=digests)
    if records:
        sections = dict.fromkeys(name for record in records for name in record.sections)
        text = _set_record(text, _Record(list(sections), digests))
    merged = ModelCard(one.content)
    merged.data = _card_data(entries, one.data, other.data)
    merged.text = text.replace("\n", "\r\n") if "\r\n" in one.content else text
    merged = ModelCard(merged.content)
    return (generated if says_the_same(merged, generated) else merged), merging.conflicts


def says_the_same(one: ModelCard, other: ModelCard) -> bool:
    """Whether two cards differ in nothing but the order of their metadata, blank lines and the like."""
    return _content(one) == _content(other)


def _content(card: ModelCard) -> tuple[Any, ...]:
    record = _Record.find(card.text)
    told = None if record is None else (set(record.sections), dict(record.metadata))
    return card.data.to_dict(), _RECORD.sub("", card.text).split(), told


def write_model_card(
    folder: str | os.PathLike[str], *, repo_id: str | None = None, **metadata: Unpack[CardMetadata]
) -> Path:
    """Writes the card of a model into its folder, merged with the one that is there.

    Args:
        folder: The model's folder.
        repo_id: The model's name on the Hub.
        **metadata: As of `build_model_card`.

    Returns:
        The card's file, README.md, which is replaced in one go.

    Raises:
        FileNotFoundError: If the folder has no config.json.
        ValueError: If a file is damaged, the card among them; the message names it. If `base_model` is no name of the
            Hub.
    """
    path = Path(folder) / CARD_FILE
    card = build_model_card(folder, repo_id=repo_id, **metadata)
    if path.is_file():
        card = merge_model_card(_load_card(path), card)
    with replacing_files(folder) as partial, open(partial / CARD_FILE, "w", encoding="utf-8", newline="") as file:
        file.write(card.content)
    return path


def _load_card(path: Path) -> ModelCard:
    try:
        return ModelCard.load(path)
    # Besides ValueError, YAML's own errors.
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a model card: {error} Mend its metadata, or move it away to get a new card."
        ) from error


@dataclass(frozen=True)
class _Record:
    """What a card says of its own making, in a comment: which sections it had, and digests of its metadata."""

    sections: Sequence[str]
    metadata: Mapping[str, str]

    @classmethod
    def find(cls, text: str) -> "_Record | None":
        """The one in a card's text, or `None` if there is none, or somebody has broken it."""
        match = _RECORD.search(text)
        try:
            content = json.loads(match[1]) if match else {}
        except ValueError:
            return None
        sections, metadata = content.get("sections"), content.get("metadata")
        if isinstance(sections, list) and isinstance(metadata, dict):
            return cls(sections, metadata)
        return None

    def __str__(self) -> str:
        content = json.dumps({"sections": self.sections, "metadata": self.metadata})
        return f"<!-- {_RECORD_NOTE} {content} -->"


def _merge_entries(
    existing: Mapping[str, Any],
    generated: Mapping[str, Any],
    *,
    old: Mapping[str, str] | None,
    new: Mapping[str, str] | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merges metadata by the digests of what was generated before (`old`) and now (`new`).

    Returns:
        The metadata, and the digests to record with them.
    """
    before, now = old or {}, generated.keys() if new is None else new
    merged = dict(existing)
    for key, value in generated.items():
        if key not in now:  # an argument of the user's
            merged[key] = _add(existing.get(key), value) if key in _ADDED else value
        elif key not in existing:
            if key not in before:
                merged[key] = value
        elif _is_untouched(existing[key], before.get(key)):
            merged[key] = _update(existing[key], value)
    gone = [key for key in before if key not in generated]
    for key in gone:
        if key in existing and _is_untouched(existing[key], before[key]):
            del merged[key]
    removed = {key: before[key] for key in gone if key not in existing}
    record = {**(new or {}), **removed}
    _settle_relation(merged, record, existing=existing, generated=generated, before=before)
    return merged, record


def _settle_relation(
    merged: dict[str, Any],
    record: dict[str, str],
    *,
    existing: Mapping[str, Any],
    generated: Mapping[str, Any],
    before: Mapping[str, str],
) -> None:
    """Decides about the relation to the base model, which is true of one base model only, in `merged` and `record`.

    It is recorded with its base model, and as nothing where it is not ours: what stands there then is the user's.
    """
    told, base = existing.get(_RELATION), merged.get("base_model")
    recorded = str(before.get(_RELATION, ""))
    is_ours = told is None or recorded.startswith(_digest(told))
    is_generated_one = base is not None and base == generated.get("base_model") and _RELATION in generated
    # If it is the base model of which we said so, and that does not stand there any more, the user has removed it.
    is_recorded_one = base == existing.get("base_model") and recorded.endswith(_digest(base))
    if is_ours and not is_recorded_one:
        told = generated[_RELATION] if is_generated_one else None
    is_told_of = is_generated_one or is_recorded_one
    _put(merged, _RELATION, told)
    _put(record, _RELATION, _digest_relation(told if is_ours else None, base) if is_told_of else None)


def _digest_relation(relation: str | None, base_model: Any) -> str:
    return _digest(relation) + _digest(base_model)


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    """Sets an entry, at the place where it is, or removes it for `None`."""
    if value is None:
        content.pop(key, None)
    else:
        content[key] = value


def _is_untouched(value: Any, digest: str | None) -> bool:
    return _digest(_comparable(value)) == digest


def _update(value: Any, generated: Any) -> Any:
    """Of a result only the value is ours to change: its test set may have been given another name."""
    if not isinstance(value, EvalResult):
        return generated
    return replace(value, metric_value=generated.metric_value, metric_args=generated.metric_args)


def _comparable(value: Any) -> Any:
    return [value.metric_value, value.metric_args] if isinstance(value, EvalResult) else value


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()[:12]


def _entries(data: Any) -> dict[str, Any]:
    """Metadata by name, each result of the model-index being an entry of its own."""
    entries = {key: value for key, value in data.to_dict().items() if key != "model-index"}
    if not data.eval_results:
        return entries
    entries["model_name"] = data.model_name
    counts: dict[str, int] = {}
    for result in data.eval_results:
        identity = identify_result(result)
        counts[identity] = counts.get(identity, 0) + 1
        # As a digest, since the names in it could end the comment that they are recorded in.
        entries[f"result {_digest([identity, counts[identity]])}"] = result
    return entries


def _card_data(entries: Mapping[str, Any], existing: Any, generated: Any) -> ModelCardData:
    """The reverse of `_entries`; the name of a model-index needs results, and the results need a name."""
    results = [value for value in entries.values() if isinstance(value, EvalResult)]
    others = {key: value for key, value in entries.items() if not isinstance(value, EvalResult)}
    if results:
        others["model_name"] = others.get("model_name") or generated.model_name
        return ModelCardData(**others, eval_results=results)
    had_results = bool(existing.eval_results)
    others["model_name"] = None if had_results else existing.model_name
    return ModelCardData(**others, eval_results=None if had_results else existing.eval_results)


def _merge_text(existing: str, generated: str, *, old: _Record | None, metadata: Mapping[str, str]) -> str:
    """Merges the texts of two cards; `metadata` is recorded if the existing text has a record, or there is no text."""
    blocks = {match["name"]: match[0] for match in _SECTION.finditer(generated)}
    if not existing.strip():
        return _set_record(generated, _Record(list(blocks), metadata))
    line_break = "\r\n" if "\r\n" in existing else "\n"
    blocks = {name: block.replace("\r\n", "\n").replace("\n", line_break) for name, block in blocks.items()}

    def renew(match: re.Match[str]) -> str:
        is_untouched = _digest(match["content"]) == match["digest"]
        return blocks.get(match["name"], "") if is_untouched else match[0]

    text = _SECTION.sub(renew, existing)
    if old is None:
        return text
    earlier: list[str] = []
    for name, block in blocks.items():
        if name not in old.sections and name not in _SECTION_START.findall(text):
            text = _insert(text, block, earlier, line_break)
        earlier.append(name)
    # Not those that have gone because nothing is known for them now: once there is, they come again.
    known = set(old.sections) - set(_SECTION_START.findall(existing)) | set(_SECTION_START.findall(text)) | set(blocks)
    sections = dict.fromkeys([*(name for name in old.sections if name in known), *blocks])
    return _set_record(text, _Record(list(sections), metadata))


def _insert(text: str, block: str, before: Sequence[str], line_break: str) -> str:
    """Puts a new section behind the last of those `before` it that the text has, or else ahead of the record."""
    ends = [match.end() for name in before for match in re.finditer(f"<!-- end: {name} -->", text)]
    if ends:
        return f"{text[: max(ends)]}{line_break * 2}{block}{text[max(ends) :]}"
    record = _RECORD.search(text)
    place = record.start() if record else len(text)
    return f"{text[:place]}{block}{line_break * 2}{text[place:]}"


@dataclass(frozen=True)
class _Atom:
    """A piece of a text that is merged whole: a generated section, or a line between two, and blank lines after it.

    Args:
        name: By which it is found in another card.
        text: All of it.
    """

    name: str
    text: str

    @property
    def said(self) -> str:
        # The record is made anew.
        return "" if self.name == _RECORD_NOTE else self.text.strip()


def _split(text: str) -> list[_Atom]:
    text = text.replace("\r\n", "\n")
    text += "" if text.endswith("\n") else "\n"
    atoms: list[_Atom] = []
    for name, piece in _pieces(text):
        if atoms and not piece.strip():
            atoms[-1] = replace(atoms[-1], text=atoms[-1].text + piece)
        else:
            atoms.append(_Atom(name, piece))
    return atoms


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    matches = [*_SECTION.finditer(text), None]
    for match in matches:
        for line in text[place : match.start() if match else None].splitlines(keepends=True):
            yield _RECORD_NOTE if _RECORD.match(line) else line.strip(), line
        if match:
            yield f"the section {match['name']}", match[0]
            place = match.end()


@dataclass
class _Merging:
    """Merges what two cards make of a third.

    Args:
        prefer: Whose edits are taken where both were edited in different ways.
        conflicts: These places.
    """

    prefer: Literal["here", "there"]
    conflicts: list[str] = field(default_factory=list)

    def merge_values(self, key: str, base: Mapping[str, Any], here: Mapping[str, Any], there: Mapping[str, Any]) -> Any:
        """An entry of the metadata, or `None` if there shall be none."""
        old, one, other = base.get(key), here.get(key), there.get(key)
        if one == other or other == old:
            return one
        if one == old:
            return other
        if key in _ADDED:
            removed = [item for item in _add(old, None) if item not in _add(one, None) or item not in _add(other, None)]
            return [item for item in _add(one, other) if item not in removed]
        self.conflicts.append("a score in the metadata" if key.startswith("result ") else f"the metadata {key}")
        return one if self.prefer == "here" else other

    def merge_atoms(self, base: list[_Atom], here: list[_Atom], there: list[_Atom]) -> Iterator[_Atom]:
        """A text, which is aligned at what all three have."""
        to_here, to_there = _align(base, here), _align(base, there)
        sides, starts = (base, here, there), [0, 0, 0]
        where = "the beginning of the text"
        for place in [*(place for place in range(len(base)) if place in to_here and place in to_there), None]:
            ends = [len(base), len(here), len(there)] if place is None else [place, to_here[place], to_there[place]]
            yield from self._choose(where, *(side[i:j] for side, i, j in zip(sides, starts, ends, strict=True)))
            if place is not None:
                yield from self._choose(where, *(side[i : i + 1] for side, i in zip(sides, ends, strict=True)))
                where = f"the text after {base[place].name}" if _SECTION.match(base[place].text) else where
                starts = [end + 1 for end in ends]

    def _choose(self, where: str, base: list[_Atom], here: list[_Atom], there: list[_Atom]) -> list[_Atom]:
        old, one, other = ([atom.said for atom in atoms] for atoms in (base, here, there))
        if one == other or other == old:
            return here
        if one == old:
            return there
        if not old and _holds(one, other):
            return here
        if not old and _holds(other, one):
            return there
        sections = dict.fromkeys(atom.name for atom in (*base, *here, *there) if _SECTION.match(atom.text))
        self.conflicts += sections or [where]
        return here if self.prefer == "here" else there


def _align(base: Sequence[_Atom], side: Sequence[_Atom]) -> dict[int, int]:
    """Which piece of a text is which of another's."""
    matcher = SequenceMatcher(None, [atom.name for atom in base], [atom.name for atom in side], autojunk=False)
    return {match.a + n: match.b + n for match in matcher.get_matching_blocks() for n in range(match.size)}


def _holds(lines: Sequence[str], others: Sequence[str]) -> bool:
    """Whether lines have all the others among them, in their order."""
    rest = iter(lines)
    return all(line in rest for line in others)


def _set_record(text: str, record: _Record) -> str:
    return _RECORD.sub(lambda _: str(record), text, count=1)


def _enclose(name: str, content: str) -> str:
    return f"<!-- generated: {name} {_digest(content)} -->\n{content}\n<!-- end: {name} -->"


def _remove_section(text: str, name: str) -> str:
    return _SECTION.sub(lambda match: "" if match["name"] == name else match[0], text)


def _as_list(value: str | list[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else value


def _add(one: Any, other: Any) -> list[str]:
    return list(dict.fromkeys([*(_as_list(one) or []), *(_as_list(other) or [])]))
