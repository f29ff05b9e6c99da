"""Draw the learning curves of a training, or of several into one picture to compare them.

    vanilla-transformer plot-curves --runs out/my-model
    vanilla-transformer plot-curves --runs out/run-a out/run-b --output_file comparison.svg

Reads the log that the Trainer keeps in trainer_state.json; a training may still be going on, from its first checkpoint.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main


@dataclass
class CurveArguments:
    """Which trainings to draw, and where to."""

    runs: list[str] = option("Output folders of trainings (or checkpoints, or trainer_state.json files).")
    output_file: str | None = option("A .png, .svg or .pdf. Default, with one run: curves.png in its folder.", None)
    title: str | None = option("Written above the picture. Default, with one run: its name.", None)
    overwrite: bool = option("Replace --output_file if it exists; curves.png in a run's folder always is.", False)

    def __post_init__(self) -> None:
        from vanilla_transformer.visualization.figures import check_picture

        if len(set(self.runs)) < len(self.runs):
            raise ValueError(f"--runs names a run twice: {' '.join(self.runs)}.")
        if len(self.runs) > 1 and self.output_file is None:
            raise ValueError(f"{len(self.runs)} runs in one picture need --output_file.")
        check_picture(self.output_file, overwrite=self.overwrite)


def draw(arguments: CurveArguments) -> None:
    """Draws the picture."""
    from vanilla_transformer.visualization import compare_learning_curves, load_trainer_state, plot_learning_curves

    states = [load_trainer_state(run) for run in arguments.runs]
    if len(states) > 1:
        path = Path(str(arguments.output_file))
        names = [Path(run).absolute().name for run in arguments.runs]
        # Two runs of one name are called by their whole paths.
        named = dict(zip(names if len(set(names)) == len(names) else arguments.runs, states, strict=True))
        logs = {name: state.log_history for name, state in named.items()}
        best_steps = {name: state.best_global_step for name, state in named.items() if state.best_global_step}
        compare_learning_curves(logs, path, title=arguments.title, best_steps=best_steps, overwrite=arguments.overwrite)
    else:
        run, state = Path(arguments.runs[0]), states[0]
        folder = run.parent if run.is_file() else run
        path = Path(arguments.output_file or folder / "curves.png")
        title = arguments.title or folder.absolute().name
        replaces = arguments.overwrite or arguments.output_file is None
        plot_learning_curves(state.log_history, path, title=title, best_step=state.best_global_step, overwrite=replaces)
    print(f"The picture is in {path}")


make_parser = partial(make_argument_parser, CurveArguments, __doc__)
main = make_main(make_parser, draw)
