r"""Measures what training costs here and elsewhere, side by side in one run.

    python scripts/benchmarks/benchmark_training.py --part loss --output_file results.json
    python scripts/benchmarks/benchmark_training.py --part loss --target_tokens 4096 --dtype bfloat16 --layers 6
    python scripts/benchmarks/benchmark_training.py --part step --d_model 256 --layers 3 --vocab_size 8000
    python scripts/benchmarks/benchmark_training.py --part throughput --train_file train.en.gz train.de.gz \
        --d_model 256 --layers 3 --vocab_size 8000 --dtype float32

Part `loss`: peak memory and time of the loss with label smoothing over a large vocabulary, once in a whole training
step with Adam and once for output layer and loss alone. The sides are this package's model without logits (its
default) and with logits, MarianMT of the same size with its own loss (not smoothed), and MarianMT under the
Trainer's `label_smoothing_factor`. Each side has a process of its own; they take turns. Memory is what a step adds
to what was there before it: of the process on a CPU (Linux only), of torch's allocator on a GPU. Processor seconds tell
more than seconds where other programs run too.

Part `step`: peak memory and time of a whole training step with Adam, of this package's model, MarianMT, FSMT, models of
the architectures of BART and T5, and `torch.nn.Transformer`, all of one size, on the same batches with some padding,
each with its own loss without label smoothing; with --compile also under `torch.compile`. They take turns as above.

Part `throughput`: real tokens per second, padding not counted, and peak memory of trainings on sentence pairs of your
own. `ours` is `TranslationTrainer` with batches of --max_tokens source and target tokens and label smoothing; `marian`
is MarianMT of the same size under `Seq2SeqTrainer` with its default batches, drawn at random, of as many pairs as ours
have on average; the other sides show what batches, loss and model contribute. They take turns in one process.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from benchmark_models import MODELS, PAD, Size, make_targets
from benchmark_tools import Clock, PeakMemory, check_at_least_one, check_device, start_process, write_report
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.batching import TokenBatchSampler, pair_lengths
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.model.loss_vanilla_transformer import compute_logits_and_loss
from vanilla_transformer.training.examples import tokenize_pairs
from vanilla_transformer.training.trainer import TranslationTrainer

SMOOTHING = 0.1
SPECIAL_TOKENS = 4
DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch")

Step = Callable[[], Any]
# Seconds, processor seconds of all threads, peak megabytes.
Measurement = tuple[float, float, float]
Results = list[dict[str, Any]]


@dataclass
class BenchmarkArguments:
    """What to measure, and at which size."""

    part: list[str] = field(
        default_factory=lambda: ["loss"],
        metadata={
            "help": "Parts to run: loss, step, throughput. Default: loss.",
            "choices": ["loss", "step", "throughput"],
        },
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})
    device: str = field(default="cpu", metadata={"help": "Where to measure: cpu (default) or cuda."})
    dtype: list[str] = field(
        default_factory=lambda: ["float32", "bfloat16"],
        metadata={"help": "float32 and/or bfloat16 (autocast). Default: both.", "choices": ["float32", "bfloat16"]},
    )
    rounds: int = field(
        default=3, metadata={"help": "Timed steps of each side, of which the median counts. Default: 3."}
    )
    target_tokens: list[int] = field(
        default_factory=lambda: [2048, 4096], metadata={"help": "Target tokens of a batch. Default: 2048 4096."}
    )
    sentence_length: int = field(default=32, metadata={"help": "Tokens of each sentence, both sides. Default: 32."})
    vocab_size: int = field(default=37000, metadata={"help": "Size of the one vocabulary. Default: 37000."})
    d_model: int = field(default=512, metadata={"help": "Width of the model, a multiple of 64. Default: 512."})
    layers: int = field(default=2, metadata={"help": "Layers of the encoder, and of the decoder. Default: 2."})
    side: list[str] = field(
        default_factory=lambda: list(MODELS),
        metadata={"help": "Part step: models to compare with ours. Default: all.", "choices": list(MODELS)},
    )
    compile: bool = field(default=False, metadata={"help": "Part step: also run every model under torch.compile."})
    padding: float = field(
        default=0.1, metadata={"help": "Part step: share of padding in a batch, both sides. Default: 0.1."}
    )
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Part throughput: two aligned text files, source first."}
    )
    max_tokens: int = field(
        default=2048, metadata={"help": "Part throughput: budget of a batch on each side. Default: 2048 tokens."}
    )
    steps: int = field(default=30, metadata={"help": "Part throughput: updates of a round. Default: 30."})

    def __post_init__(self) -> None:
        if "throughput" in self.part and self.train_file is None:
            raise ValueError("--train_file must be given for the part throughput: two aligned text files.")
        check_at_least_one(self, ("rounds", "sentence_length", "layers", "max_tokens", "steps"))
        if not 0 <= self.padding <= 0.4:
            raise ValueError(f"--padding is {self.padding}; it must be between 0 and 0.4.")
        if self.vocab_size <= SPECIAL_TOKENS:
            raise ValueError(f"--vocab_size is {self.vocab_size}; it must be more than {SPECIAL_TOKENS}.")
        if self.d_model < 64 or self.d_model % 64:
            raise ValueError(f"--d_model is {self.d_model}; it must be a multiple of 64.")
        if "ours" not in self.side:
            self.side = ["ours", *self.side]
        for tokens in self.target_tokens:
            if tokens < self.sentence_length:
                raise ValueError(
                    f"--target_tokens is {tokens}; it must be at least {self.sentence_length}, a sentence."
                )
        check_device(self.device)


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)


# Part "loss"


@dataclass
class Workload:
    """One side at one size; sent to the side's process."""

    arguments: BenchmarkArguments
    level: str
    side: str
    dtype: str
    target_tokens: int

    def autocast(self) -> Any:
        """The context of a forward pass."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.arguments.device.split(":")[0], dtype=getattr(torch, self.dtype))

    def ids(self, sentences: int) -> torch.Tensor:
        """Random sentences (B, L) without special tokens or padding."""
        shape = (sentences, self.arguments.sentence_length)
        return torch.randint(SPECIAL_TOKENS, self.arguments.vocab_size, shape, device=self.arguments.device)


def sizes(arguments: BenchmarkArguments) -> dict[str, Any]:
    """The configuration that both models share."""
    sides = ("encoder", "decoder")
    heads = arguments.d_model // 64
    return {
        "vocab_size": arguments.vocab_size,
        "d_model": arguments.d_model,
        **{f"{side}_layers": arguments.layers for side in sides},
        **{f"{side}_attention_heads": heads for side in sides},
        **{f"{side}_ffn_dim": 4 * arguments.d_model for side in sides},
        "dropout": 0.1,
        "max_position_embeddings": max(1024, arguments.sentence_length),
        "scale_embedding": True,
        "activation_function": "relu",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    }


def make_model(workload: Workload) -> Any:
    """A random model of the workload's side, in training mode."""
    if workload.side.startswith("marian"):
        return MarianMTModel(MarianConfig(**sizes(workload.arguments), forced_eos_token_id=None)).train()
    config = VanillaTransformerConfig(**sizes(workload.arguments), label_smoothing=SMOOTHING)
    return VanillaTransformerForConditionalGeneration(config).train()


def forward_of_model(workload: Workload, model: Any, source: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of the whole model, as the Trainer would get it."""
    batch = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    if workload.side == "marian, label_smoothing_factor":
        # The collator makes the decoder's inputs, and the Trainer withholds the labels from the model.
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**batch, decoder_input_ids=decoder_input_ids, use_cache=False)
        return LabelSmoother(epsilon=SMOOTHING)(outputs, labels)
    options = {"skip_logits": False} if workload.side == "ours, with logits" else {}
    return model(**batch, labels=labels, **options).loss


def make_training_step(workload: Workload) -> Callable[[int], Step]:
    """A whole training step on so many sentences: forward, backward, Adam."""
    model = make_model(workload).to(workload.arguments.device)
    add_update = make_updates(workload, model)

    def make_step(sentences: int) -> Step:
        source, labels = workload.ids(sentences), workload.ids(sentences)
        return add_update(lambda: forward_of_model(workload, model, source, labels))

    return make_step


def make_updates(workload: Workload, model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], Step]:
    """Makes a computation of the loss a training step with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def add_update(compute_loss: Callable[[], torch.Tensor]) -> Step:
        def step() -> None:
            with workload.autocast():
                loss = compute_loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return add_update


def make_output_step(workload: Workload) -> Callable[[int], Step]:
    """Output layer and loss alone, forward and backward down to the hidden states."""
    arguments = workload.arguments
    layer = nn.Linear(arguments.d_model, arguments.vocab_size, bias=False).to(arguments.device)
    final_logits_bias = torch.zeros(1, arguments.vocab_size, device=arguments.device)

    def compute_loss(hidden_states: torch.Tensor, labels: torch.Tensor) -> Any:
        if workload.side.startswith("ours"):
            skip_logits = workload.side == "ours"
            return compute_logits_and_loss(layer, hidden_states, labels, SMOOTHING, None, skip_logits)[1]
        logits = layer(hidden_states) + final_logits_bias
        if workload.side == "marian, label_smoothing_factor":
            return LabelSmoother(epsilon=SMOOTHING)({"logits": logits}, labels)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def make_step(sentences: int) -> Step:
        labels = workload.ids(sentences)
        hidden_states = torch.randn(*labels.shape, arguments.d_model, device=arguments.device, requires_grad=True)

        def step() -> None:
            with workload.autocast():
                loss = compute_loss(hidden_states, labels)
            loss.backward()
            layer.weight.grad = hidden_states.grad = None

        return step

    return make_step


def make_step_of_a_model(workload: Workload) -> Callable[[int], Step]:
    """Part `step`: a whole training step of one of several models, without label smoothing."""
    arguments = workload.arguments
    side, _, compiled = workload.side.partition(", ")
    width = arguments.d_model
    size = Size(width, 4 * width, arguments.layers, width // 64, arguments.vocab_size)
    model = MODELS[side](size).to(arguments.device).train()
    add_update = make_updates(workload, model)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def make_step(sentences: int) -> Step:
        length = arguments.sentence_length
        lengths = torch.linspace(length, length * (1 - 2 * arguments.padding), sentences).round()
        mask = (torch.arange(length) < lengths[:, None]).to(arguments.device)
        batch = {"input_ids": workload.ids(sentences).masked_fill(~mask, PAD), "attention_mask": mask.long()}
        batch |= make_targets(workload.ids(sentences).masked_fill(~mask, -100))
        return add_update(lambda: forward(**batch).loss)

    return make_step


LOSS_LEVELS = {"training step": make_training_step, "output layer and loss": make_output_step}
LEVELS = {**LOSS_LEVELS, "step of each model": make_step_of_a_model}
LOSS_SIDES = ("ours", "ours, with logits", "marian", "marian, label_smoothing_factor")


def serve(workload: Workload, connection: Connection) -> None:
    """The process of one side: measures a step whenever it is asked to, and sends its time and memory."""
    torch.manual_seed(0)
    arguments = workload.arguments
    make_step = LEVELS[workload.level](workload)
    # What is allocated once for all, such as Adam's moments, is no part of a step.
    make_step(1)()
    step = make_step(workload.target_tokens // arguments.sentence_length)
    connection.send("ready")
    while connection.recv():
        with PeakMemory(arguments.device) as memory, Clock(arguments.device) as watch:
            step()
        connection.send((watch.seconds, watch.processor_seconds, memory.megabytes))


def measure(workloads: list[Workload]) -> list[list[Measurement]]:
    """Lets the workloads take turns, each in a fresh process; the first round is not timed.

    Returns:
        For each workload the measurements of every round.
    """
    servers = [start_process(serve, workload) for workload in workloads]
    for connection, _ in servers:
        connection.recv()
    rounds: list[list[Measurement]] = []
    for _ in range(1 + workloads[0].arguments.rounds):
        rounds.append([])
        for connection, _ in servers:
            connection.send(True)
            rounds[-1].append(connection.recv())
    for connection, process in servers:
        connection.send(False)
        process.join()
    return [list(of_one) for of_one in zip(*rounds, strict=True)]


def benchmark_loss(arguments: BenchmarkArguments) -> Results:
    """Part `loss`: every side at every size."""
    results: Results = []
    for dtype in arguments.dtype:
        for tokens in arguments.target_tokens:
            for level in LOSS_LEVELS:
                results += compare(arguments, level, LOSS_SIDES, dtype, tokens)
    return results


def benchmark_step(arguments: BenchmarkArguments) -> Results:
    """Part `step`: every model at every size."""
    sides = [side for side in MODELS if side in arguments.side]
    if arguments.compile:
        sides += [f"{side}, compiled" for side in sides]
    results: Results = []
    for dtype in arguments.dtype:
        for tokens in arguments.target_tokens:
            results += compare(arguments, "step of each model", sides, dtype, tokens)
    return results


def compare(arguments: BenchmarkArguments, level: str, sides: Sequence[str], dtype: str, tokens: int) -> Results:
    """Measures all sides at one size, and prints the table."""
    measured = measure([Workload(arguments, level, side, dtype, tokens) for side in sides])
    rows = summarize({"level": level, "dtype": dtype, "target_tokens": tokens}, sides, measured)
    print(make_table(rows), flush=True)
    return rows


def summarize(setting: dict[str, Any], sides: Sequence[str], measured: list[list[Measurement]]) -> Results:
    """One row per side: largest memory, median times, and how much of each the first side takes in proportion."""
    rows: Results = []
    for side, rounds in zip(sides, measured, strict=True):
        seconds, processor_seconds, _ = zip(*rounds[1:], strict=True)
        figures = {
            "peak_megabytes": max(megabytes for *_, megabytes in rounds),
            "seconds": statistics.median(seconds),
            "processor_seconds": statistics.median(processor_seconds),
        }
        first = rows[0] if rows else figures
        shares = {f"ours_over_this_{name}": first[name] / figure for name, figure in figures.items()}
        rows.append({**setting, "side": side, **figures, **shares})
    return rows


def make_table(rows: Results) -> str:
    """The rows of one setting; each ratio is what ours takes, divided by what this side takes."""
    first = rows[0]
    lines = [f"\n{first['level']}, {first['dtype']}, {first['target_tokens']:,} target tokens", " " * 32]
    columns = {"peak_megabytes": "peak MB", "seconds": "seconds", "processor_seconds": "CPU seconds"}
    lines[-1] += "".join(f"{title:>12}{'ours/this':>10}" for title in columns.values())
    for row in rows:
        figures = (f"{row[name]:>12,.2f}{row[f'ours_over_this_{name}']:>10.2f}" for name in columns)
        lines.append(f"{row['side']:<32}{''.join(figures)}")
    return "\n".join(lines)


# Part "throughput"


BATCHES = {
    "ours": "tokens",
    "ours, sentence batches": "sentences",
    "marian, token batches": "tokens",
    "marian": "sentences",
    "marian, label_smoothing_factor": "sentences",
}
WARM_UP_STEPS = 3


class Stopwatch(TrainerCallback):
    """Real tokens and time of the updates after the first ones, and the memory that a training adds."""

    def __init__(self) -> None:
        self.tokens = self.cells = 0
        self.seconds = self.processor_seconds = self.megabytes = 0.0

    def count(self, inputs: dict[str, torch.Tensor]) -> None:
        """Counts the tokens of a batch, and its cells, which padding fills up; of both sides."""
        self.tokens += int(inputs["attention_mask"].sum() + (inputs["labels"] != -100).sum())
        self.cells += inputs["input_ids"].numel() + inputs["labels"].numel()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts after the warm-up and reads the time ever after."""
        now, processor_now = time.perf_counter(), time.process_time()
        if state.global_step == WARM_UP_STEPS:
            self.tokens = self.cells = 0
            self._start, self._processor_start = now, processor_now
        elif state.global_step > WARM_UP_STEPS:
            self.seconds, self.processor_seconds = now - self._start, processor_now - self._processor_start


def make_counting_trainer(kind: type[Seq2SeqTrainer], stopwatch: Stopwatch, **settings: Any) -> Seq2SeqTrainer:
    """A trainer of this kind whose batches are counted when they are trained on."""

    class CountingTrainer(kind):  # type: ignore[misc, valid-type]
        def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            stopwatch.count(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    return CountingTrainer(callbacks=[stopwatch], **settings)


def train_for_a_while(arguments: BenchmarkArguments, side: str, model: Any, data: Any, folder: str) -> Stopwatch:
    """Trains one side for the number of updates asked for, from wherever its model stands."""
    tokenizer, dataset, sentences = data
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": WARM_UP_STEPS + arguments.steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": arguments.device == "cpu",
        "bf16": arguments.dtype[0] == "bfloat16",
        "dataloader_pin_memory": arguments.device != "cpu",
        "per_device_train_batch_size": sentences,
        "label_smoothing_factor": SMOOTHING if side.endswith("label_smoothing_factor") else 0.0,
    }
    trainer_kind: type[Seq2SeqTrainer] = Seq2SeqTrainer
    training_arguments: Any = Seq2SeqTrainingArguments(**settings)
    if BATCHES[side] == "tokens":
        trainer_kind = TranslationTrainer
        # The rest is as the library has it by default.
        training_arguments.max_source_tokens = training_arguments.max_target_tokens = arguments.max_tokens
    stopwatch = Stopwatch()
    trainer = make_counting_trainer(
        trainer_kind,
        stopwatch,
        model=model,
        args=training_arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.remove_callback(PrinterCallback)
    with PeakMemory(arguments.device) as memory:
        trainer.train()
    stopwatch.megabytes = memory.megabytes
    return stopwatch


def load_training_data(arguments: BenchmarkArguments) -> tuple[Any, Any, int]:
    """The tokenizer, the tokenized corpus, and the sentences that a token batch has on average."""
    corpus = load_parallel_corpus(files=arguments.train_file, source_lang="source", target_lang="target")
    tokenizer = train_tokenizer([*corpus["source"], *corpus["target"]], vocab_size=arguments.vocab_size)
    dataset = tokenize_pairs(corpus, tokenizer, max_source_length=256, max_target_length=256, name="the corpus")
    source_lengths, target_lengths = pair_lengths(dataset)
    sampler = TokenBatchSampler(
        source_lengths, target_lengths, max_source_tokens=arguments.max_tokens, max_target_tokens=arguments.max_tokens
    )
    return tokenizer, dataset, max(1, round(len(dataset) / len(sampler)))


def benchmark_throughput(arguments: BenchmarkArguments) -> Results:
    """Part `throughput`: real tokens per second of a training, both sides of the sentences together."""
    data = load_training_data(arguments)
    print(f"A batch of {arguments.max_tokens:,} + {arguments.max_tokens:,} tokens has {data[2]} pairs on average.")
    models = {
        side: make_model(Workload(arguments, "training", side, arguments.dtype[0], arguments.max_tokens))
        for side in BATCHES
    }
    rounds: dict[str, list[Stopwatch]] = {side: [] for side in BATCHES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for side, model in models.items():
                rounds[side].append(train_for_a_while(arguments, side, model, data, folder))
                speed = rounds[side][-1].tokens / rounds[side][-1].seconds
                print(f"round {number + 1}, {side}: {speed:,.0f} tokens/s", flush=True)
    results: Results = []
    for side, watches in rounds.items():
        figures = {
            "tokens_per_second": statistics.median(watch.tokens / watch.seconds for watch in watches),
            "tokens_per_processor_second": statistics.median(
                watch.tokens / watch.processor_seconds for watch in watches
            ),
            "peak_megabytes": max(watch.megabytes for watch in watches),
        }
        first = results[0] if results else figures
        # A small training adds no memory to what the process has already.
        ratios = {
            f"ours_over_this_{name}": first[name] / figure if figure else None for name, figure in figures.items()
        }
        padding = 1 - sum(watch.tokens for watch in watches) / sum(watch.cells for watch in watches)
        results.append({"side": side, "dtype": arguments.dtype[0], **figures, **ratios, "padding_share": padding})
    print(make_throughput_table(results), flush=True)
    return results


def make_throughput_table(rows: Results) -> str:
    """A line for each side; each ratio is ours divided by this side's."""
    lines = [
        f"\n{'real tokens per':<32}{'second':>10}{'ours/this':>11}{'CPU second':>12}{'ours/this':>11}{'padding':>10}"
        f"{'peak MB':>12}{'ours/this':>11}"
    ]
    for row in rows:
        lines.append(
            f"{row['side']:<32}{row['tokens_per_second']:>10,.0f}{row['ours_over_this_tokens_per_second']:>11.2f}"
            f"{row['tokens_per_processor_second']:>12,.0f}{row['ours_over_this_tokens_per_processor_second']:>11.2f}"
            f"{row['padding_share']:>10.1%}"
            f"{row['peak_megabytes']:>12,.0f}{row['ours_over_this_peak_megabytes'] or math.nan:>11.2f}"
        )
    return "\n".join(lines)


# The parts, by the names that --part takes.
PARTS: dict[str, Callable[[BenchmarkArguments], Results]] = {
    "loss": benchmark_loss,
    "step": benchmark_step,
    "throughput": benchmark_throughput,
}


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), measure, print, and write the figures."""
    (arguments,) = make_parser().parse_args_into_dataclasses(args=argv)
    results = {name: PARTS[name](arguments) for name in dict.fromkeys(arguments.part)}
    write_report(arguments.output_file, "benchmark_training.py", argv, DISTRIBUTIONS, arguments, results)


if __name__ == "__main__":
    main()
