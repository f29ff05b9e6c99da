"""Average checkpoints of a training run, or any models of one architecture, into a model to load like any other.

    python scripts/average_checkpoints.py --model_dir out/my-model --last 5 --output_dir out/averaged
    python scripts/average_checkpoints.py --model_dir out/my-model --best 5 --metric eval_bleu --output_dir out/averaged
    python scripts/average_checkpoints.py --checkpoints out/seed-1 out/seed-2 --output_dir out/averaged

Reads and writes safetensors. Nothing is overwritten. Tokenizer and settings are those of the last checkpoint.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.training.averaging import average_checkpoints, select_checkpoints


@dataclass
class AveragingArguments:
    """What to average, and where to."""

    output_dir: str = field(metadata={"help": "A new folder for the average."})
    model_dir: str | None = field(default=None, metadata={"help": "The output folder of a training run."})
    last: int | None = field(default=None, metadata={"help": "Average the last so many checkpoints of the run."})
    best: int | None = field(default=None, metadata={"help": "Average the best so many checkpoints of the run."})
    metric: str | None = field(
        default=None,
        metadata={"help": "What the best ones are chosen by, eval_bleu say. Default: what the run chose its best by."},
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether greater values are better. Default: unless it is a loss or an error rate."},
    )
    checkpoints: list[str] | None = field(default=None, metadata={"help": "Average these folders."})
    max_shard_size: str = field(default="50GB", metadata={"help": "Split larger weights into files of this size."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        """Checks that it is clear what to average.

        Raises:
            ValueError: If it is not.
        """
        if (self.model_dir is None) == (self.checkpoints is None):
            raise ValueError("Give either --model_dir with --last or --best, or --checkpoints.")
        choices = ("last", "best", "metric", "greater_is_better")
        if self.checkpoints is not None and (extra := [name for name in choices if getattr(self, name) is not None]):
            raise ValueError(
                f"--{extra[0]} chooses among the checkpoints of --model_dir; --checkpoints are all averaged."
            )

    def select(self) -> list[Path]:
        """The folders to average."""
        if self.model_dir is None:
            return [Path(checkpoint) for checkpoint in self.checkpoints or ()]
        return select_checkpoints(
            self.model_dir,
            last=self.last,
            best=self.best,
            metric=self.metric,
            greater_is_better=self.greater_is_better,
        )


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return make_argument_parser(AveragingArguments, __doc__)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and average."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        checkpoints = arguments.select()
        average_checkpoints(
            checkpoints,
            arguments.output_dir,
            max_shard_size=arguments.max_shard_size,
            progress=not arguments.disable_tqdm,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"The average of {', '.join(map(str, checkpoints))} is in {arguments.output_dir}")


if __name__ == "__main__":
    main()
