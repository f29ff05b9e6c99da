"""Files that are made from parts, each of which is complete or absent: translations, or a corpus that is cleaned."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from vanilla_transformer.data.records import Part, RecordFile, find_kind, is_local, open_path
from vanilla_transformer.files import check_new_file, check_new_folder, new_file, new_folder

from .outputs import MakePairs, Piece, check_alike, check_columns, check_records, write_translations
from .processes import Processes
from .translate import Translation

# What stands in a folder of parts.
_OWN_NAME = re.compile(
    r"(plan|published)\.json|\d{6,}\.(jsonl|lock)|unfinished|joined|\.(plan|\d{6,})\.jsonl?-.+|\.nfs.+"
)


class Product(Protocol):
    """What is made from parts."""

    @property
    def overwrite(self) -> bool:
        """Whether it may replace what is there."""

    @property
    def place(self) -> Path:
        """What stands beside the unfinished parts."""

    def check_new(self) -> None:
        """Makes sure that nothing is overwritten unasked."""

    def exists(self) -> bool:
        """Whether it is there."""

    def write(self, work: "Work", folder: Path) -> Path:
        """Writes it from all parts into an empty folder; returns its path there, or the folder."""

    def put(self, joined: Path) -> None:
        """Moves what was written to where it belongs; what was moved before a sudden end is not in it any more."""


def find_lock(product: Product) -> Path:
    """The file that says that a run is at work; hidden, since the output may lie in the folder of the input."""
    return product.place.with_name(f".{product.place.name}.partial.lock")


@dataclass(frozen=True)
class Output:
    """A file or folder of translations."""

    name: str
    target_column: str
    n_best: int | None
    overwrite: bool
    parts_dir: str | os.PathLike[str] | None
    make_pairs: MakePairs | None = None

    def __str__(self) -> str:
        return self.name

    @cached_property
    def is_folder(self) -> bool:
        """Whether there is a file for each one of the input."""
        return self.name.endswith("/")

    @cached_property
    def is_local(self) -> bool:
        """Whether it is in this machine's own file system."""
        return is_local(self.name)

    @cached_property
    def path(self) -> Path:
        """Where it is, in its own file system."""
        return Path(open_path(self.name)[1])

    @cached_property
    def place(self) -> Path:
        """What stands beside the unfinished parts."""
        if self.parts_dir is not None:  # where outputs of other folders may have the same name
            whole = os.path.realpath(self.path) if self.is_local else self.name
            return Path(self.parts_dir) / f"{self.path.name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        if not self.is_local:
            raise ValueError(f"{self}: give a folder for unfinished parts (--parts_dir), which all processes share.")
        return self.path

    def check(self, files: list[RecordFile]) -> None:
        """Makes sure that it can be written as it is wanted; whether it is there is another question."""
        kinds = {find_kind(file.path) for file in files} if self.is_folder else {find_kind(self.name)}
        if self.make_pairs is not None and "text" in kinds:
            raise ValueError(f"{self}: pairs are written to a table; its name must end with .tsv, .jsonl or .parquet.")
        if self.make_pairs is None and self.n_best is not None and kinds != {"text"}:
            raise ValueError(f"n_best is {self.n_best}, and {self} is {', '.join(sorted(kinds))}; it must be text.")
        names = [PurePosixPath(file.path).name for file in files]
        if self.is_folder and len(set(names)) < len(names):
            raise ValueError(f"{self}: several files of the input have the same name; translate them one by one.")
        targets = [self.path / name for name in names] if self.is_folder else [self.path]
        references = (self.make_pairs and self.make_pairs.references) or ()
        for kind, read in (("input file", files), ("file of references", references)):
            places = {os.path.realpath(open_path(file.path)[1]) for file in read if is_local(file.path)}
            if self.is_local and not places.isdisjoint(map(os.path.realpath, targets)):
                raise ValueError(f"{self}: the output file is the {kind}.")
        if self.keeps_records(files):
            check_columns(files, self.target_column)
            if not self.is_folder:
                check_alike(files, find_kind(self.name))

    def keeps_records(self, files: list[RecordFile]) -> bool:
        """Whether records are written as they are, with a translation added."""
        return self.make_pairs is None and (self.is_folder or {file.kind for file in files} == {find_kind(self.name)})

    def check_records(self, files: list[RecordFile]) -> None:
        """Reads all records, and makes sure that none that is kept has the translation's key or place."""
        check_records(files, self.target_column if self.keeps_records(files) else None)

    def check_new(self) -> None:
        """Makes sure that nothing is overwritten unasked."""
        if self.is_local:
            _ = check_new_folder(self.path) if self.is_folder else check_new_file(self.path, overwrite=self.overwrite)
        elif self.exists() and (self.is_folder or not self.overwrite):
            advice = "Name a new folder." if self.is_folder else "Choose another name, or replace it with --overwrite."
            raise FileExistsError(f"{self} exists. {advice}")

    def exists(self) -> bool:
        """Whether it is there; an empty folder is not."""
        system, path = open_path(self.name)
        return bool(system.exists(path)) and not (self.is_folder and not system.ls(path, detail=False))

    def write(self, work: "Work", folder: Path) -> Path:
        """Writes the output, or the files of it, from all parts."""
        every = range(len(work.parts))
        name = PurePosixPath(self.name).name
        wanted = {name: list(every)}
        if self.is_folder:
            names = [PurePosixPath(file.path).name for file in work.files]
            wanted = {name: [i for i in every if work.parts[i].file == file] for file, name in enumerate(names)}
        for name, numbers in wanted.items():
            pieces = (
                Piece(work.files[work.parts[number].file], work.parts[number], work.translations([number]))
                for number in numbers
            )
            sources = [file for file in work.files if not self.is_folder or PurePosixPath(file.path).name == name]
            options: dict[str, Any] = {"target_column": self.target_column, "n_best": self.n_best}
            options |= {"files": sources, "make_pairs": self.make_pairs}
            write_translations(folder / name, pieces, **options)
        return folder if self.is_folder else folder / name

    def put(self, joined: Path) -> None:
        """Moves what was written to where it belongs, or copies it there if that is another file system."""
        if self.is_local:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # No folder can take the place of a link to one.
                joined.replace(self.path.resolve() if self.is_folder else self.path)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._copy(joined)
            return
        system, path = open_path(self.name)
        system.makedirs(path if self.is_folder else str(PurePosixPath(path).parent), exist_ok=True)
        for source in sorted(joined.iterdir()) if self.is_folder else [joined]:
            system.put_file(str(source), f"{path}/{source.name}" if self.is_folder else path)

    def _copy(self, joined: Path) -> None:
        if not self.is_folder:
            with new_file(self.path, overwrite=True) as unfinished:
                shutil.copyfile(joined, unfinished)
        elif not self.exists():  # else a run was ended between the copy and the removal of the folder of parts
            with new_folder(self.path) as unfinished:
                shutil.copytree(joined, unfinished, dirs_exist_ok=True)


@dataclass
class Work:
    """The folder of a run's parts: its plan, the parts that are finished, and what they are joined to.

    Its state is a file: `plan.json`, which is called `published.json` from where the output may be replaced.
    """

    folder: Path
    inputs: list[tuple[str, str | None]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "Work":
        """Reads the plan; a folder without one has no parts."""
        for name in ("plan.json", "published.json"):
            with suppress(FileNotFoundError):
                plan = json.loads((folder / name).read_text(encoding="utf-8"))
                parts = [Part(*part) for part in plan["parts"]]
                return cls(folder, [tuple(file) for file in plan["inputs"]], parts, plan["settings"])
        return cls(folder)

    def save(self) -> None:
        """Writes the plan, with which the folder begins to count."""
        plan = {"settings": self.settings, "inputs": self.inputs, "parts": list(map(astuple, self.parts))}
        write_whole(self.folder / "plan.json", [json.dumps(plan)])

    @property
    def total(self) -> int:
        """The records of all parts."""
        return sum(part.count for part in self.parts)

    @cached_property
    def files(self) -> list[RecordFile]:
        """The input."""
        return [RecordFile(*file) for file in self.inputs]

    @property
    def joined(self) -> Path:
        """The output before it has its place."""
        return self.folder / "joined"

    @property
    def is_published(self) -> bool:
        """Whether all parts have been joined."""
        return (self.folder / "published.json").exists()

    @property
    def is_open(self) -> bool:
        """Whether parts may be missing."""
        return (self.folder / "plan.json").exists()

    def path(self, number: int) -> Path:
        """The translations of a part."""
        return self.folder / f"{number:06d}.jsonl"

    def find_finished(self) -> set[int]:
        """The numbers of the parts that are finished: all, where the folder is gone already."""
        try:
            names = [os.path.splitext(name) for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return set(range(len(self.parts)))
        return {int(stem) for stem, suffix in names if suffix == ".jsonl" and stem.isdigit()}

    @staticmethod
    def owns(folder: Path) -> bool:
        """Whether a folder is one of these, and not somebody's that happens to be called so."""
        return all(map(_OWN_NAME.fullmatch, os.listdir(folder)))

    def discard(self) -> None:
        """Removes the folder, which does not count any more as soon as it has no state."""
        for name in ("plan.json", "published.json"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder)

    def check(self, settings: dict[str, Any], processes: Processes) -> None:
        """Makes sure that this process sees the same folder as the first, and has the same model."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"Process {processes.rank} on {socket.gethostname()} does not see {self.folder}: all processes need a "
                "folder that they share. Name one with --parts_dir."
            )
        if changed := [name for name in settings if settings[name] != self.settings[name]]:
            where = f"Process {processes.rank} on {socket.gethostname()}"
            raise ValueError(f"{where} has another {' and '.join(changed)} than the first process.")

    def translations(self, numbers: list[int]) -> Iterator[list[Translation]]:
        """Those of some parts, in order."""
        for number in numbers:
            with self.path(number).open(encoding="utf-8") as file:
                for line in file:
                    yield [Translation(*each) for each in json.loads(line)]

    def publish(self, product: Product) -> None:
        """Joins the parts, puts what is made of them in its place, and removes the folder."""
        if not self.is_published:
            if not self.joined.exists():
                self.join(product)
            product.check_new()
            (self.folder / "plan.json").rename(self.folder / "published.json")
        if self.joined.exists():
            product.put(self.joined)
        for path in self.folder.iterdir():
            if path.name != "published.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (self.folder / "published.json").unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def join(self, product: Product) -> None:
        """Writes it from all parts, to what is complete or absent."""
        unfinished = self.folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        written = product.write(self, unfinished)
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        written.replace(self.joined)


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a file that is complete or absent, whoever else writes the same."""
    unfinished = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
