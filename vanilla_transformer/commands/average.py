"""Average checkpoints of a training run, or models that were trained on from one, into a model to load like any other.

    vanilla-transformer average --model_dir out/my-model --last 5 --output_dir out/averaged
    vanilla-transformer average --model_dir out/my-model --best 5 --metric eval_bleu --output_dir out/averaged
    vanilla-transformer average --checkpoints out/my-model out/my-model/checkpoint-9000 --output_dir out/averaged

Models that began with other weights, as those of other seeds, have no meaningful mean: let them vote (`translate
--model_name_or_path out/seed-1 out/seed-2`).
Reads and writes safetensors. Nothing is overwritten. Tokenizer and settings are those of the last checkpoint.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vanilla_transformer.options import DISABLE_TQDM, SWITCH, option

from .command_line import make_argument_parser, make_main


@dataclass
class AveragingArguments:
    """What to average, and where to."""

    output_dir: str = option("A new folder for the average.")
    model_dir: str | None = option("The output folder of a training run.", None)
    last: int | None = option("Average the last so many checkpoints of the run.", None)
    best: int | None = option("Average the best so many checkpoints of the run.", None)
    metric: str | None = option("What the best are chosen by, eval_bleu say. Default: as in the run.", None)
    greater_is_better: bool | None = option(
        "Default: true, unless the metric is a loss or an error rate.", None, **SWITCH
    )
    checkpoints: list[str] | None = option("Average these folders.", None)
    max_shard_size: str = option("Split larger weights into files of this size.", "50GB")
    disable_tqdm: bool = option(DISABLE_TQDM, False)

    def __post_init__(self) -> None:
        if (self.model_dir is None) == (self.checkpoints is None):
            raise ValueError("Give either --model_dir with --last or --best, or --checkpoints.")
        given = [f"--{name}" for name, value in self.choice.items() if value is not None]
        if self.checkpoints is not None and given:
            raise ValueError(f"{given[0]} chooses among the checkpoints of --model_dir, not among --checkpoints.")

    @property
    def choice(self) -> dict[str, int | str | bool | None]:
        """What chooses among the checkpoints of a run."""
        return {name: getattr(self, name) for name in ("last", "best", "metric", "greater_is_better")}


def run(arguments: AveragingArguments) -> None:
    """Averages."""
    from vanilla_transformer.training.averaging import average_checkpoints, select_checkpoints

    checkpoints = [Path(checkpoint) for checkpoint in arguments.checkpoints or ()]
    if arguments.model_dir is not None:
        choice: Any = arguments.choice
        checkpoints = select_checkpoints(arguments.model_dir, **choice)
    average_checkpoints(
        checkpoints, arguments.output_dir, max_shard_size=arguments.max_shard_size, progress=not arguments.disable_tqdm
    )
    print(f"The average of {', '.join(map(str, checkpoints))} is in {arguments.output_dir}")


make_parser = partial(make_argument_parser, AveragingArguments, __doc__)
main = make_main(make_parser, run)
