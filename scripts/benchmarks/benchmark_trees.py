"""Compare the speed of two checkouts of this repository, in one run: is a change slower than what was there before?

    git worktree add ../before main
    python scripts/benchmarks/benchmark_trees.py ../before .

It measures beam search, greedy search, a training step, the loading of a model and `import vanilla_transformer`. Each
checkout has a process of its own, and the two take turns, so that both see the same machine. It prints the medians in
milliseconds and their ratio: below 1, the second checkout is faster. Run nothing else meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FRESH = "import: a new process"
_IMPORT = "import time; start = time.perf_counter(); import vanilla_transformer; print(time.perf_counter() - start)"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="A checkout.")
    parser.add_argument("after", type=Path, help="Another one.")
    parser.add_argument("--rounds", type=int, default=15, help="How often each part is measured (default: 15).")
    return parser


def make_parts(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is measured, with a model of 3 + 3 layers and 32 sentences of 20 tokens; `folder` is for the saved model."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset("small", encoder_ffn_dim=512, decoder_ffn_dim=512)
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.eos_token_id = None  # all sentences have the same length
    model.save_pretrained(folder)
    ids = torch.randint(4, config.vocab_size, (32, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def search(beams: int) -> Any:
        return model.eval().generate(ids, num_beams=beams, max_new_tokens=30, pad_token_id=1, eos_token_id=None)

    return {
        "beam 4, batch 32": lambda: search(4),
        "greedy, batch 32": lambda: search(1),
        "a training step": step,
        "loading a model": lambda: AutoModelForSeq2SeqLM.from_pretrained(folder),
    }


def serve(folder: Path) -> None:
    """Answers each name on standard input with the seconds that this part took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parts = make_parts(folder)
    print(json.dumps(list(parts)), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        parts[line.strip()]()
        print(time.perf_counter() - start, file=answers, flush=True)


class Side:
    """A checkout, and the process that runs its code."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree.resolve()
        if not (self.tree / "vanilla_transformer" / "__init__.py").is_file():
            raise SystemExit(f"{tree} is no checkout: there is no vanilla_transformer/__init__.py.")
        self.environment = {**os.environ, "PYTHONPATH": str(self.tree), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.parts: list[str] = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]

    def measure(self, part: str) -> float:
        """Seconds of one part."""
        if part == FRESH:
            command = [sys.executable, "-c", _IMPORT]  # which looks into the current folder first
            done = subprocess.run(command, env=self.environment, cwd=self.tree, stdout=subprocess.PIPE, check=True)
            return float(done.stdout)
        print(part, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())  # type: ignore[union-attr]


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints a line for each part."""
    import tempfile

    arguments = make_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trees = (arguments.before, arguments.after)
        sides = [Side(tree, Path(folder, str(number))) for number, tree in enumerate(trees)]
        for part in [*sides[0].parts, FRESH]:
            seconds: tuple[list[float], list[float]] = ([], [])
            for side in sides:
                side.measure(part)  # warm-up
            for round_number in range(arguments.rounds):
                for index in (0, 1) if round_number % 2 else (1, 0):
                    seconds[index].append(sides[index].measure(part))
            before, after = (1000 * statistics.median(each) for each in seconds)
            print(f"{part:25} {before:9.1f} {after:9.1f} {after / before:6.3f}", flush=True)
        for side in sides:
            side.process.terminate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        main()
