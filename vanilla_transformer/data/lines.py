"""The lines of text files, read one after the other or in blocks; without `datasets`, which takes long to import."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import BinaryIO, cast

import numpy as np

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 22
TABLE_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl", ".parquet")
# Of the report that `clean` writes beside a corpus.
REPORT_SUFFIX = ".report.json"
# Some of what is neither decompressed here nor text.
_OTHER_COMPRESSIONS = (".zst", ".lz4", ".lzma", ".zip", ".7z", ".tgz")
_COMPRESSIONS: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

# Is told what is wrong with a line, which is read all the same; without one, that is an error.
OnDamage = Callable[[str], None]


def is_compressed(path: str | Path) -> bool:
    """Whether a file is compressed, by its name."""
    return Path(path).suffix.lower() in _COMPRESSIONS


def find_suffix(path: str | Path) -> str:
    """The last suffix before that of a compression, in lower case."""
    return Path(Path(path).stem if is_compressed(path) else path).suffix.lower()


def is_table(path: str | Path) -> bool:
    """Whether a file holds records with columns rather than plain text, by its name."""
    return find_suffix(path) in TABLE_SUFFIXES


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading is about what a compressed file holds, and not the operating system's."""
    if type(error) is OSError:
        return error.errno is None  # bz2's
    return isinstance(error, EOFError | gzip.BadGzipFile | lzma.LZMAError | zlib.error)


def is_report(path: str | Path) -> bool:
    """Whether a file says what was cleaned, by its name: it is no part of the corpus in its folder."""
    return str(path).endswith(REPORT_SUFFIX)


def refuse_compression(path: str | PurePath) -> None:
    """Raises a `ValueError` if a file's name says that it is compressed, and not as it can be read."""
    suffix = PurePath(path).suffix.lower()
    if suffix in _OTHER_COMPRESSIONS:
        raise ValueError(f"{path}: {suffix} is neither read nor written here; compress it as .gz, .bz2 or .xz.")


def _open_bytes(path: str | Path) -> BinaryIO:
    refuse_compression(path)
    return cast(BinaryIO, _COMPRESSIONS.get(Path(path).suffix.lower(), open)(path, mode="rb"))


def strip_line_end(line: str) -> str:
    r"""A line without the "\n" or "\r\n" that ends it."""
    return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line


def without_surrogates(text: str) -> str:
    """A text with U+FFFD for halves of surrogate pairs, which JSON may have, but no file and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def decode_lines(
    file: Iterable[bytes], name: str | Path, first: int = 1, on_damage: OnDamage | None = None
) -> Generator[str, None, int]:
    """Yields lines of UTF-8, without a byte order mark, with their line ends; returns the last one's number."""
    number = first - 1
    try:
        for number, line in enumerate(file, start=first):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                where = f"{name}, line {number}: byte 0x{line[error.start]:02x} at position {error.start} of the line"
                if on_damage is None:
                    raise ValueError(f"{where} is not UTF-8. Convert the file to UTF-8 first.") from error
                on_damage(f"{where} is not UTF-8.")
                text = line.decode(errors="replace")
            yield text
    except Exception as error:
        if not is_damage(error):
            raise
        raise ValueError(f"{name}, after line {number}: truncated or damaged compressed file ({error}).") from error
    return number


@contextmanager
def open_text(path: str | Path) -> Iterator[Iterator[str]]:
    """Opens UTF-8 text, decompressed as its suffix says, and yields its lines as [`decode_lines`] does."""
    with _open_bytes(path) as file:
        yield decode_lines(file, path)


@dataclass(frozen=True)
class Lines:
    """Lines of a file that follow each other: where they begin, the number of the first, how many (None: all)."""

    path: str | Path
    offset: int = 0
    first: int = 1
    count: int | None = None
    on_damage: OnDamage | None = field(default=None, compare=False)

    def __iter__(self) -> Iterator[str]:
        """Yields them with their line ends."""
        with _open_bytes(self.path) as file:
            file.seek(self.offset)
            number = yield from decode_lines(islice(file, self.count), self.path, self.first, self.on_damage)
        if number == 0:
            raise ValueError(f"{self.path}: the file is empty.")
        if self.count is not None and number != self.first + self.count - 1:
            raise ValueError(f"{self.path} ends after line {number}: it has changed while it is in use.")

    def divide(self, size: int) -> list["Lines"]:
        """Looks for every `size`-th line of a file, unless it is compressed, without decoding it."""
        if is_compressed(self.path):
            return [self]
        lines = position = 0
        ended = True
        starts = [0]
        with open(self.path, "rb") as file:
            while chunk := file.read(_READ_BYTES):
                line_ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
                before_next = len(starts) * size - lines - 1
                starts.extend((position + line_ends[before_next::size] + 1).tolist())
                lines += len(line_ends)
                position += len(chunk)
                ended = chunk.endswith(b"\n")
        if position == 0:
            raise ValueError(f"{self.path}: the file is empty.")
        lines += not ended
        return [
            Lines(self.path, offset, first=done + 1, count=min(size, lines - done))
            for done, offset in zip(range(0, lines, size), starts, strict=False)  # the last start may be the file's end
        ]


def read_lines(path: str | Path) -> list[str]:
    r"""Reads UTF-8 text (`.gz`, `.bz2`, `.xz` too) as lines, which only "\n" and "\r\n" end, and leaves these out."""
    return [strip_line_end(line) for line in Lines(path)]
