"""Table 3 of the paper: its rows, the same rows scaled down, and what was measured next to what was printed.

One factor multiplies the widths d_model, d_ff, d_k and d_v, another the number of layers. All else stays, so that what
a row changes against "base" stays in proportion. Sizes are whole numbers: a factor that would break one is refused.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.training.recipe import paper_recipe


class PaperFigures(NamedTuple):
    """What Table 3 prints for a row, on newstest2013 English-German, without averaging of checkpoints."""

    perplexity: float
    bleu: float
    # Millions; where the table leaves a cell empty, base's.
    parameters: int


PAPER: dict[str, PaperFigures] = {
    "base": PaperFigures(4.92, 25.8, 65),
    "A-h1": PaperFigures(5.29, 24.9, 65),
    "A-h4": PaperFigures(5.00, 25.5, 65),
    "A-h16": PaperFigures(4.91, 25.8, 65),
    "A-h32": PaperFigures(5.01, 25.4, 65),
    "B-dk16": PaperFigures(5.16, 25.1, 58),
    "B-dk32": PaperFigures(5.01, 25.4, 60),
    "C-N2": PaperFigures(6.11, 23.7, 36),
    "C-N4": PaperFigures(5.19, 25.3, 50),
    "C-N8": PaperFigures(4.88, 25.5, 80),
    "C-d256": PaperFigures(5.75, 24.5, 28),
    "C-d1024": PaperFigures(4.66, 26.0, 168),
    "C-ff1024": PaperFigures(5.12, 25.4, 53),
    "C-ff4096": PaperFigures(4.75, 26.2, 90),
    "D-drop0": PaperFigures(5.77, 24.6, 65),
    "D-drop0.2": PaperFigures(4.95, 25.5, 65),
    "D-ls0": PaperFigures(4.67, 25.3, 65),
    "D-ls0.2": PaperFigures(5.47, 25.7, 65),
    "E-learned": PaperFigures(4.92, 25.7, 65),
    "big": PaperFigures(4.33, 26.4, 213),
}


def check_rows(rows: Sequence[str]) -> None:
    """Checks that all of them are rows of Table 3, each named once."""
    if unknown := [row for row in rows if row not in PAPER]:
        raise ValueError(f"rows: {', '.join(unknown)} not among the rows of Table 3, which are {', '.join(PAPER)}.")
    if len(set(rows)) != len(rows):
        raise ValueError(f"rows: {' '.join(rows)} names a row twice.")


def parse_factor(name: str, text: str) -> Fraction:
    """Reads a positive factor such as 0.25 or 1/4, exactly. The message calls it `name`."""
    with suppress(ValueError, ZeroDivisionError):
        if (factor := Fraction(text)) > 0:
            return factor
    raise ValueError(f"{name}={text}: must be a positive number such as 0.25 or 1/4.")


def scale_overrides(row: str, *, scale: Fraction, layers_factor: Fraction) -> dict[str, int]:
    """The fields of the preset that scaling changes. Sizes that are not whole or not legal are a ValueError."""
    check_rows([row])
    config = VanillaTransformerConfig.from_preset(row)
    head_size = config.d_model // config.encoder_attention_heads
    names = ("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_layers", "decoder_layers")
    sizes = {name: getattr(config, name) for name in names}
    sizes |= {"d_k": config.d_k or head_size, "d_v": config.d_v or head_size}
    overrides = {}
    for name, size in sizes.items():
        factor = layers_factor if name.endswith("layers") else scale
        scaled = size * factor
        if scaled.denominator != 1:
            raise ValueError(f"Row {row}: {name} = {size} * {factor} = {float(scaled):g} is not a whole number.")
        if scaled != size:
            overrides[name] = int(scaled)
    try:
        VanillaTransformerConfig.from_preset(row, **overrides)
    except StrictDataclassError as error:
        raise ValueError(f"Row {row} with scale={scale}: {error}") from error
    return overrides


def count_steps(row: str, base_steps: int) -> int:
    """Returns the updates of a row when "base" has `base_steps`: three times as many for big, as in the paper."""
    paper_steps, paper_base = (paper_recipe(name, num_devices=1)["max_steps"] for name in (row, "base"))
    return int(Fraction(base_steps * paper_steps, paper_base))


@dataclass(frozen=True)
class Measurement:
    """What a trained row came to; `config` has its columns of Table 3, as `describe_config` names them.

    Perplexities are per target token, `</s>` included; BLEU is SacreBLEU.
    """

    row: str
    config: dict[str, float]
    steps: int
    parameters: int
    perplexity: float
    bleu: float
    test_perplexity: float | None = None
    test_bleu: float | None = None


def describe_config(config: VanillaTransformerConfig) -> dict[str, float]:
    """Returns the columns of Table 3 that describe a model, by the paper's names; both of its stacks are alike."""
    head_size = config.d_model // config.encoder_attention_heads
    return {
        "N": config.encoder_layers,
        "d_model": config.d_model,
        "d_ff": config.encoder_ffn_dim,
        "h": config.encoder_attention_heads,
        "d_k": config.d_k or head_size,
        "d_v": config.d_v or head_size,
        "P_drop": float(config.dropout),
        "eps_ls": float(config.label_smoothing),
    }


def _cells(measurement: Measurement, *, with_test: bool) -> dict[str, str]:
    paper = PAPER[measurement.row]
    cells = {
        "row": measurement.row,
        **{name: f"{value:g}" for name, value in measurement.config.items()},
        "steps": f"{measurement.steps:,}",
        "PPL paper": f"{paper.perplexity:.2f}",
        "PPL": f"{measurement.perplexity:.2f}",
        "BLEU paper": f"{paper.bleu:.1f}",
        "BLEU": f"{measurement.bleu:.1f}",
        "params*10^6 paper": str(paper.parameters),
        "params*10^6": f"{measurement.parameters / 1e6:.1f}",
    }
    if with_test:
        perplexity, bleu = measurement.test_perplexity, measurement.test_bleu
        cells["test PPL"] = "" if perplexity is None else f"{perplexity:.2f}"
        cells["test BLEU"] = "" if bleu is None else f"{bleu:.1f}"
    return cells


def make_cells(measurements: Sequence[Measurement]) -> list[list[str]]:
    """The table's cells: headers, then measurements in the paper's order; with columns of the test set if need be."""
    with_test = any(measurement.test_bleu is not None for measurement in measurements)
    ordered = sorted(measurements, key=lambda measurement: list(PAPER).index(measurement.row))
    rows = [_cells(measurement, with_test=with_test) for measurement in ordered]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def format_text(cells: Sequence[Sequence[str]]) -> str:
    """Returns a table for the terminal: the first column flush left, the others flush right."""
    first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *values in cells:
        right = [value.rjust(width) for value, width in zip(values, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]).rstrip() + "\n")
    return "".join(lines)


def format_markdown(cells: Sequence[Sequence[str]]) -> str:
    """Returns the same table in Markdown."""
    # Markdown would take a pair of asterisks or underscores for emphasis.
    escaped = [[value.replace("*", r"\*").replace("_", r"\_") for value in row] for row in cells]
    headers, *rows = escaped
    ruler = [":---", *["---:"] * (len(headers) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [headers, ruler, *rows])


def describe_search(generation_config: Mapping[str, Any]) -> str:
    """Says how translations were searched for, "beam 4, length penalty 1.0", and how the paper's search differs."""
    penalty = generation_config.get("length_penalty")
    kind = generation_config.get("length_penalty_type") or "transformers"
    formula = {
        "transformers": "score / length^penalty, the library's formula; the paper divides by ((5 + length) / 6)^0.6",
        "gnmt": "score / ((5 + length) / 6)^penalty, the paper's formula; its penalty is 0.6",
    }
    value = 1.0 if penalty is None else penalty
    return f"beam {generation_config.get('num_beams') or 1}, length penalty {value:g} ({formula.get(kind, kind)})"
