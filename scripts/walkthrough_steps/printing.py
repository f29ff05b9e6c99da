"""How `scripts/walkthrough.py` prints: texts filled to the terminal's width, matrices with words beside them.

A text is made of blocks with an empty line in between. A block that begins with "# " is a heading, one that begins with
four spaces is printed as it is, any other is a paragraph, whose line breaks mean nothing.
"""

import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence

import torch

WIDEST = 100
INDENT = "    "
SHOWN_COLUMNS = 6  # of a matrix whose columns have no names
TOLERANCE = 1e-5
_OPERATORS = ("=", "+", "*", "/")
_OPENING = "（《“"  # noqa: RUF001 (meant as they are)
_CLOSING = "，。、；：？！）》”"  # noqa: RUF001


def is_wide(character: str) -> bool:
    """Whether a terminal gives the character two columns, as it does with Chinese."""
    return unicodedata.east_asian_width(character) in ("W", "F")


def display_width(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(1 + is_wide(character) for character in text)


def right_align(text: str, width: int) -> str:
    """Puts spaces before the text."""
    return " " * (width - display_width(text)) + text


def _may_end_line(text: str, index: int) -> bool:
    """Whether a line may end before text[index]: at a space outside of formulas, and around Chinese characters."""
    before, after = text[index - 1], text[index]
    if " " in (before, after):
        return after == " " and before not in _OPERATORS and text[index + 1 : index + 2] not in _OPERATORS
    return (is_wide(before) or is_wide(after)) and before not in _OPENING and after not in _CLOSING


def fill(paragraph: str, width: int) -> str:
    """Breaks a paragraph into lines of at most so many columns."""
    lines = [""]
    start = 0
    for end in range(1, len(paragraph) + 1):
        if end < len(paragraph) and not _may_end_line(paragraph, end):
            continue
        piece = paragraph[start:end]
        if lines[-1] and display_width(lines[-1] + piece) > width:
            lines.append(piece.lstrip(" "))
        else:
            lines[-1] += piece
        start = end
    return "\n".join(lines)


def join_lines(block: str) -> str:
    """Undoes line breaks: a space in their place, but none between Chinese characters and beside their punctuation."""
    joined, *rest = block.split("\n")
    for line in rest:
        before, after = joined[-1], line[0]
        is_chinese = (
            (is_wide(before) and is_wide(after)) or before in _OPENING + _CLOSING or after in _OPENING + _CLOSING
        )
        joined += line if is_chinese else f" {line}"
    return joined


class Printer:
    """Prints in one language."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.width = min(shutil.get_terminal_size().columns, WIDEST)
        self._text_ends_here = False

    def say(self, name: str, **values: object) -> None:
        """Prints the text of that name."""
        after_heading = False
        for block in self.texts[name].strip("\n").format(**values).split("\n\n"):
            if not after_heading:
                print()
            after_heading = block.startswith("# ")
            if after_heading:
                title = block.removeprefix("# ")
                print(f"{title}\n{'-' * display_width(title)}")
            else:
                print(block if block.startswith(INDENT) else fill(join_lines(block), self.width))
        self._text_ends_here = True
        sys.stdout.flush()

    def _begin_numbers(self) -> None:
        """Leaves a line between text and numbers."""
        if self._text_ends_here:
            print()
        self._text_ends_here = False

    def show(
        self,
        name: str,
        axes: str,
        tensor: torch.Tensor,
        rows: Sequence[str] = (),
        *,
        at: tuple[int, ...] = (),
        columns: Sequence[str] = (),
        notes: Sequence[str] = (),
        digits: int = 2,
    ) -> None:
        """Prints a tensor's name and shape, and perhaps one matrix of it.

        Args:
            name: Its name.
            axes: What its axes are: "B, S, D".
            tensor: The tensor.
            rows: What stands before each row of the matrix; rows beyond these are left out. None: only the shape.
            at: Which matrix, if the tensor has more than two axes.
            columns: What stands above each column. Without it only the first columns are printed.
            notes: What stands behind each row.
            digits: Decimals.
        """
        self._begin_numbers()
        matrix = tensor[at]
        parts = [f"{name} ({axes}) = ({', '.join(map(str, tensor.shape))})"]
        if rows and at:
            parts.append(self.texts["part"].format(indices=", ".join(map(str, at))))
        if 0 < len(rows) < matrix.shape[0]:
            parts.append(self.texts["first_rows"].format(shown=len(rows), total=matrix.shape[0]))
        shown = len(columns) or min(SHOWN_COLUMNS, matrix.shape[-1])
        if rows and shown < matrix.shape[-1]:
            parts.append(self.texts["first_columns"].format(shown=shown, total=matrix.shape[-1]))
        print(fill(self.texts["comma"].join(parts) + (self.texts["colon"] if rows else ""), self.width))
        if rows:
            self.rows(rows, matrix[: len(rows), :shown], columns, notes, digits)

    def lines(self, lines: Sequence[str]) -> None:
        """Prints lines, moved in."""
        self._begin_numbers()
        print("\n".join(INDENT + line for line in lines))

    def align(self, *rows: Sequence[object]) -> None:
        """Prints lists of words or numbers below one another, in columns."""
        self._begin_numbers()
        columns = zip(*rows, strict=True)
        widths = [max(display_width(str(value)) for value in column) for column in columns]
        for row in rows:
            print(INDENT + "  ".join(map(right_align, map(str, row), widths)))

    def check(
        self,
        name: str,
        by_hand: torch.Tensor,
        by_model: torch.Tensor,
        *,
        where: torch.Tensor | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Prints by how much two computations of one thing differ.

        Args:
            name: What the model calls it.
            by_hand: The one.
            by_model: The other, of the same shape.
            where: True where they are compared, of the shape of their first axes; `None`: everywhere.
            tolerance: By how much they may differ, for which rounding is to blame; of numbers above 1, relatively.

        Raises:
            ValueError: If they differ by more, or in their shapes.
        """
        if by_hand.shape != by_model.shape:
            raise ValueError(f"{name} is {tuple(by_hand.shape)} by hand and {tuple(by_model.shape)} by the model.")
        differences = (by_hand - by_model).abs()
        difference = (differences if where is None else differences[where]).max().item()
        allowed = tolerance * max(1.0, by_model.abs().max().item())
        if not difference <= allowed:  # "not", because of NaN
            raise ValueError(f"{name} by hand and by the model differ by {difference}; rounding explains {allowed}.")
        self._begin_numbers()
        print(fill(self.texts["check"].format(name=name, difference=difference), self.width))

    def rows(
        self,
        rows: Sequence[str],
        matrix: torch.Tensor,
        columns: Sequence[str] = (),
        notes: Sequence[str] = (),
        digits: int = 2,
    ) -> None:
        """Prints a matrix (rows, columns), with a word before each row and perhaps above each column."""
        self._begin_numbers()
        first = len(INDENT) + max(map(display_width, rows))
        width = max(digits + 5, *(display_width(column) + 2 for column in ("", *columns)))
        if columns:
            print(" " * first + "".join(right_align(column, width) for column in columns))
        rounded = matrix.double().round(decimals=digits) + 0.0  # no -0.00
        for index, (name, values) in enumerate(zip(rows, rounded.tolist(), strict=True)):
            numbers = "".join(f"{value:{width}.{digits}f}" for value in values)
            print(right_align(name, first) + numbers + (f"   {notes[index]}" if notes else ""))
