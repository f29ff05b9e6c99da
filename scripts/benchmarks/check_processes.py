r"""Kills processes of translations at random moments, and looks whether the results are those of one process.

    python scripts/benchmarks/check_processes.py --model_name_or_path out/demo --input_file in.txt --num_kills 30
    python scripts/benchmarks/check_processes.py --model_name_or_path out/demo --input_file in.parquet --num_processes 4

A translation by one process, without a kill, is what the others are compared with, byte by byte. Then translations are
started with torchrun. At a random moment a random process of theirs, or torchrun itself, is killed (SIGKILL). torchrun
may start the others again (one time in two), or the same command is given again, until the output is there. Then
the next translation begins, until there were --num_kills kills. Most of them come while parts are translated and
joined, the others at any moment. Numbers in float32 may differ with the batch that a sentence is in; parts are the same
here whatever is killed, so that no translation may differ. It fails, with status 1, if one does.
"""

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.options import option

_PATIENCE_SECONDS = 600


@dataclass
class CheckArguments:
    """What to translate, and how often to kill."""

    model_name_or_path: str = option("Folder or Hub name of a sequence-to-sequence model.")
    input_file: str = option("What `translate` takes.")
    output_dir: str = option("A new folder for translations. Default: out/check_processes.", "out/check_processes")
    suffix: str = option("Of the output: its kind. Default: .txt.", ".txt")
    num_kills: int = option("Processes to kill. Default: 30.", 30)
    num_processes: int = option("Processes of a translation. Default: 2.", 2)
    num_beams: int = option("Beams. Default: 1.", 1)
    window_size: int = option("Lines of a part, at the most. Default: 64.", 64)
    seed: int = option("Of the random moments. Default: 0.", 0)


class Run:
    """A translation by torchrun."""

    def __init__(self, command: list[str], processes: int, restarts: int, log: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        launcher += [f"--max_restarts={restarts}", "-m", "vanilla_transformer", *command[2:]]
        with log.open("a") as file:
            self.process = psutil.Popen([sys.executable, *launcher], stdout=file, stderr=file)
        self.known: list[psutil.Process] = []

    def find_processes(self) -> list[psutil.Process]:
        """Torchrun and the processes that it has started."""
        try:
            found = [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.known = [*{*self.known, *found}]
        return found

    def kill_one(self, chooser: random.Random) -> bool:
        """Kills a random one, torchrun seldom; returns whether there was one."""
        found = self.find_processes()
        if not found or self.process.poll() is not None:
            return False
        target = found[0] if len(found) == 1 or chooser.random() < 0.1 else chooser.choice(found[1:])
        try:
            target.kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def wait(self) -> None:
        """Waits for all; those whose torchrun was killed go on by themselves."""
        self.process.wait(timeout=_PATIENCE_SECONDS)
        _, alive = psutil.wait_procs(self.known, timeout=_PATIENCE_SECONDS)
        if alive:
            raise TimeoutError(f"{alive} have not ended.")


def list_parts(output: Path) -> set[Path]:
    """The files of a translation that is not finished."""
    return set(output.parent.glob(f"{output.name}.parts-*/**/*"))


def kill_in_turn(
    arguments: CheckArguments, command: list[str], output: Path, chooser: random.Random
) -> tuple[int, int]:
    """Translates until the output is there, with a kill in each run; returns the kills and the runs."""
    kills = runs = 0
    while not output.exists():
        restarts = chooser.choice([0, 1])
        log = output.with_suffix(".log")
        before = list_parts(output)
        run = Run([*command, str(output)], arguments.num_processes, restarts, log)
        runs += 1
        waits_for_parts = chooser.random() < 0.75
        while run.process.poll() is None and waits_for_parts and list_parts(output) == before:
            time.sleep(0.01)
        time.sleep(chooser.uniform(0, 1.0 if waits_for_parts else 8.0))
        was_killed = run.kill_one(chooser)
        run.wait()
        kills += was_killed
        if not was_killed and not output.exists():
            raise SystemExit(f"A translation has failed without a kill: see {log}.")
    return kills, runs


def run(arguments: CheckArguments) -> None:
    """Compares, until there were kills enough."""
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--model_name_or_path", arguments.model_name_or_path, "--input_file", arguments.input_file]
    options += ["--num_beams", str(arguments.num_beams), "--window_size", str(arguments.window_size), "--disable_tqdm"]
    command = ["-m", "vanilla_transformer", "translate", *options, "--device", "cpu", "--output_file"]
    expected = folder / f"expected{arguments.suffix}"
    subprocess.run([sys.executable, *command, str(expected)], check=True)
    chooser = random.Random(arguments.seed)
    kills = runs = translations = 0
    while kills < arguments.num_kills:
        output = folder / f"output-{translations}{arguments.suffix}"
        more_kills, more_runs = kill_in_turn(arguments, command, output, chooser)
        kills, runs, translations = kills + more_kills, runs + more_runs, translations + 1
        if output.read_bytes() != expected.read_bytes():
            raise SystemExit(f"{output} is not what {expected} is.")
        print(f"{output.name}: {more_kills} kills in {more_runs} runs, equal", flush=True)
    print(f"{translations} translations with {kills} kills in {runs} runs: each is that of one process.")


make_parser = partial(make_argument_parser, CheckArguments, __doc__)
main = make_main(make_parser, run)


if __name__ == "__main__":
    main()
