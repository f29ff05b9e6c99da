r"""Draws the learning curves of a training, or of several into one picture to compare them.

    python scripts/plot_learning_curves.py --runs out/my-model
    python scripts/plot_learning_curves.py --runs out/run-a out/run-b --output_file comparison.svg

Reads the log that the Trainer keeps in trainer_state.json; a training may still be going on, from its first checkpoint.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.visualization import compare_learning_curves, load_trainer_state, plot_learning_curves


@dataclass
class CurveArguments:
    """Which trainings to draw, and where to."""

    runs: list[str] = field(
        metadata={"help": "Output folders of trainings (or checkpoints, or trainer_state.json files)."}
    )
    output_file: str | None = field(
        default=None, metadata={"help": "The picture: .png, .svg or .pdf. Default, with one run: curves.png there."}
    )
    title: str | None = field(
        default=None, metadata={"help": "Written above the picture. Default, with one run: its name."}
    )

    def __post_init__(self) -> None:
        """Checks what several runs need.

        Raises:
            ValueError: If a run is given twice, or several runs without a name for their picture.
        """
        if len(set(self.runs)) < len(self.runs):
            raise ValueError(f"--runs names a run twice: {' '.join(self.runs)}.")
        if len(self.runs) > 1 and self.output_file is None:
            raise ValueError(f"{len(self.runs)} runs in one picture need --output_file.")


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    return make_argument_parser(CurveArguments, __doc__)


def name_runs(runs: list[str]) -> list[str]:
    """Calls each run by the last part of its path, or by all of it where two would have one name."""
    names = [Path(run).absolute().name for run in runs]
    return names if len(set(names)) == len(names) else runs


def draw(arguments: CurveArguments) -> Path:
    """Draws the picture and returns its path."""
    runs = arguments.runs
    states = [load_trainer_state(run) for run in runs]
    if len(runs) > 1:
        named = dict(zip(name_runs(runs), states, strict=True))
        path = Path(str(arguments.output_file))
        compare_learning_curves(
            {name: state.log_history for name, state in named.items()},
            path,
            title=arguments.title,
            best_steps={name: state.best_global_step for name, state in named.items() if state.best_global_step},
        )
        return path
    folder = Path(runs[0]).parent if Path(runs[0]).is_file() else Path(runs[0])
    path = Path(arguments.output_file or folder / "curves.png")
    title = arguments.title or folder.absolute().name
    plot_learning_curves(states[0].log_history, path, title=title, best_step=states[0].best_global_step)
    return path


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's), and draws."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        path = draw(arguments)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"The picture is in {path}")


if __name__ == "__main__":
    main()
