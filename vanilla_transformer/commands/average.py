"""Average checkpoints of a training run, or any models of one architecture, into a model to load like any other.

    vanilla-transformer average --model_dir out/my-model --last 5 --output_dir out/averaged
    vanilla-transformer average --model_dir out/my-model --best 5 --metric eval_bleu --output_dir out/averaged
    vanilla-transformer average --checkpoints out/seed-1 out/seed-2 --output_dir out/averaged

Reads and writes safetensors. Nothing is overwritten. Tokenizer and settings are those of the last checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vanilla_transformer.options import option

from .command_line import OptionParser, explaining_errors, make_argument_parser


@dataclass
class AveragingArguments:
    """What to average, and where to."""

    output_dir: str = option("A new folder for the average.")
    model_dir: str | None = option("The output folder of a training run.", None)
    last: int | None = option("Average the last so many checkpoints of the run.", None)
    best: int | None = option("Average the best so many checkpoints of the run.", None)
    metric: str | None = option(
        "What the best ones are chosen by, eval_bleu say. Default: what the run chose its best by.", None
    )
    greater_is_better: bool | None = option(
        "Whether greater values are better. Default: unless it is a loss or an error rate.", None
    )
    checkpoints: list[str] | None = option("Average these folders.", None)
    max_shard_size: str = option("Split larger weights into files of this size.", "50GB")
    disable_tqdm: bool = option("Show no progress bar.", False)

    def __post_init__(self) -> None:
        if (self.model_dir is None) == (self.checkpoints is None):
            raise ValueError("Give either --model_dir with --last or --best, or --checkpoints.")
        if self.checkpoints is not None:
            for name, value in self.choice.items():
                if value is not None:
                    raise ValueError(
                        f"--{name} chooses among the checkpoints of --model_dir; --checkpoints are all averaged."
                    )

    @property
    def choice(self) -> dict[str, int | str | bool | None]:
        """What chooses among the checkpoints of a run."""
        return {name: getattr(self, name) for name in ("last", "best", "metric", "greater_is_better")}


def make_parser() -> OptionParser:
    """The command line's parser."""
    return make_argument_parser(AveragingArguments, __doc__)


def run(arguments: AveragingArguments) -> None:
    """Averages."""
    from vanilla_transformer.training.averaging import average_checkpoints, select_checkpoints

    checkpoints = [Path(checkpoint) for checkpoint in arguments.checkpoints or ()]
    if arguments.model_dir is not None:
        choice: Any = arguments.choice
        checkpoints = select_checkpoints(arguments.model_dir, **choice)
    average_checkpoints(
        checkpoints,
        arguments.output_dir,
        max_shard_size=arguments.max_shard_size,
        progress=not arguments.disable_tqdm,
    )
    print(f"The average of {', '.join(map(str, checkpoints))} is in {arguments.output_dir}")


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's) and averages."""
    parser = make_parser()
    with explaining_errors(parser):
        run(*parser.parse_args_into_dataclasses(argv))
