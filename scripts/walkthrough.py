"""Walk through "Attention Is All You Need" with numbers: its equations by hand, beside what the model computes.

    python scripts/walkthrough.py
    python scripts/walkthrough.py --lang zh

A model with 32 dimensions is taken apart, step by step: embedding, positions, one head of attention, masks, all heads,
residual and norm, feed-forward, decoder, attention to the source, softmax, loss, Adam. Then it learns to translate six
nouns in five colours, shows what it looks at, and decodes. What is computed by hand is compared with the model's own
value, and the script fails if they differ. All of it takes about 8 seconds on one CPU core.

Read the code beside its output: `run` below has a function for each step, and walkthrough_steps/equations.py has the
equations.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import set_seed
from walkthrough_steps import learning_steps, model_steps
from walkthrough_steps.chinese import CHINESE
from walkthrough_steps.english import ENGLISH
from walkthrough_steps.printing import Printer
from walkthrough_steps.walk import Walk

from vanilla_transformer.commands.command_line import make_argument_parser, utf8_to_a_reader_who_may_leave

TEXTS = {"en": ENGLISH, "zh": CHINESE}


@dataclass
class WalkthroughArguments:
    """How to walk."""

    lang: str = field(default="en", metadata={"help": "Language of the text.", "choices": list(TEXTS)})
    steps: int = field(default=400, metadata={"help": "Training steps in all, the first of which is taken apart."})
    seed: int = field(default=11, metadata={"help": "Of initial weights and batches."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; it must be at least 1.")


def run(arguments: WalkthroughArguments) -> None:
    """Walk."""
    set_seed(arguments.seed)
    walk = Walk(Printer(TEXTS[arguments.lang]), arguments.seed)
    with torch.no_grad():
        model_steps.introduce(walk)
        model_steps.present_task(walk)
        embedded = model_steps.embed(walk)
        x = model_steps.add_positions(walk, embedded)
        model_steps.attend_with_one_head(walk, x)
        model_steps.mask_padding(walk, x)
        attended = model_steps.attend_with_all_heads(walk, x)
        normed = model_steps.add_and_normalize(walk, x, attended)
        encoded = model_steps.feed_forward_and_encode(walk, normed)
        y = model_steps.mask_the_future(walk)
        decoded = model_steps.attend_to_source(walk, y, encoded)
        logits = model_steps.predict(walk, decoded)
        learning_steps.compute_loss(walk, logits)
    optimizer = learning_steps.make_optimizer(walk)
    learning_steps.update_once(walk, optimizer)
    learning_steps.train(walk, optimizer, arguments.steps, arguments.disable_tqdm)
    with torch.no_grad():
        learning_steps.align(walk, arguments.steps)
        learning_steps.decode_greedily(walk)
        learning_steps.decode_with_beams(walk)
    walk.out.say("outro")


make_parser = partial(make_argument_parser, WalkthroughArguments, __doc__, shows_defaults=True)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and walk."""
    (arguments,) = make_parser().parse_args_into_dataclasses(args=argv)
    # More threads would only wait for one another with so small a model, and would round differently.
    torch.set_num_threads(1)
    with utf8_to_a_reader_who_may_leave():
        run(arguments)


if __name__ == "__main__":
    main()
