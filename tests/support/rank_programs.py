"""What the processes of `many_processes` run; what they find out they leave in files for the tests to look at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict
import train as training_script
from accelerate.accelerator import Accelerator
from accelerate.state import PartialState
from accelerate.utils.dataclasses import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from sudden_ends import Kill, arm, kill_group
from tiny_vanilla import make_model, make_sentences, pad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.batching import TokenBatchSampler
from vanilla_transformer.model import loss_vanilla_transformer
from vanilla_transformer.training import records
from vanilla_transformer.training.sharding import save_sharded_model
from vanilla_transformer.training.trainer import TranslationTrainer

torch.set_num_threads(1)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def write_line(path: Path, content: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def unpadded(batch: dict[str, torch.Tensor]) -> list[list[list[int]]]:
    return [
        [ids[mask.bool()].tolist(), labels[labels != -100].tolist()]
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ]


def watch_batches(folder: Path) -> None:
    """Writes every training batch of this rank down before it is trained on."""
    train_on = TranslationTrainer.training_step

    def training_step(self: TranslationTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        folder.mkdir(exist_ok=True)
        entry = {"world": world_size(), "step": self.state.global_step, "pairs": unpadded(inputs)}
        entry["cells"] = inputs["input_ids"].numel() + inputs["labels"].numel()
        entry["sharded"] = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        write_line(folder / f"{rank()}.jsonl", entry)
        return train_on(self, model, inputs, *args, **kwargs)

    TranslationTrainer.training_step = training_step  # type: ignore[method-assign]


def kill_in_step(by_rank: int, step: int) -> None:
    """One rank kills the whole group before it trains on the batch that follows so many updates."""
    train_on = TranslationTrainer.training_step

    def training_step(self: TranslationTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == step and rank() == by_rank:
            kill_group()
        return train_on(self, *args, **kwargs)

    TranslationTrainer.training_step = training_step  # type: ignore[method-assign]


def kill_in_save(by_rank: int, step: int) -> None:
    """One rank kills the whole group before it saves its random state, when the first has begun to save the weights."""
    save = TranslationTrainer._save_rng_state

    def save_rng_state(self: TranslationTrainer, output_dir: str) -> None:
        if self.state.global_step == step and rank() == by_rank:
            while not Path(output_dir).exists():
                time.sleep(0.01)
            kill_group()
        save(self, output_dir)

    TranslationTrainer._save_rng_state = save_rng_state  # type: ignore[method-assign]


def allow_sharding_on_cpu() -> None:
    """Lets accelerate divide models on CPUs as it does on GPUs; by itself it ignores FSDP without a word there."""
    prepare = Accelerator.__init__

    def prepare_sharding(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        plugin = FullyShardedDataParallelPlugin()  # from the variables that `accelerate launch` sets
        # What accelerate's state does on a GPU.
        self.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.state.fsdp_plugin = plugin

    Accelerator.__init__ = prepare_sharding


def train(
    arguments: list[str],
    batches: str | None = None,
    in_step: tuple[int, int] | None = None,
    in_save: tuple[int, int] | None = None,
    kill: dict[str, Any] | None = None,
    sharded: bool = False,
    longer: int = 0,
) -> None:
    """scripts/train.py with a command line, without curves; each rank may generate `longer` tokens more than the last.

    `batches` is the folder for those of each rank, `in_step` and `in_save` are rank and step of `kill_in_step` and
    `kill_in_save`, `kill` are the fields of a `Kill`. `sharded` is as the variables of `accelerate launch` say.
    """
    vars(records)["plot_learning_curves"] = lambda log_history, path, **_: Path(path).touch()
    if batches:
        watch_batches(Path(batches))
    if in_step:
        kill_in_step(*in_step)
    if in_save:
        kill_in_save(*in_save)
    if kill:
        arm(Kill(**kill), Path(arguments[arguments.index("--output_dir") + 1]))
    if sharded:
        allow_sharding_on_cpu()
    limit = 12 + longer * int(os.environ.get("RANK", 0))
    training_script.main([*arguments, "--generation_max_length", str(limit)])


def prepared_loader(folder: str, rows: list[dict[str, list[int]]], budget: int, epochs: int) -> None:
    """The loop that the documentation of `TokenBatchSampler` gives to users of accelerate."""
    accelerator = Accelerator(cpu=True)
    dataset = Dataset.from_list(rows)
    lengths = ([len(row[name]) for row in rows] for name in ("input_ids", "labels"))
    limits: dict[str, Any] = {"max_source_tokens": budget, "max_target_tokens": budget}
    sampler = TokenBatchSampler(*lengths, **limits, num_replicas=accelerator.num_processes, rank=None)
    collator = DataCollatorForSeq2Seq(VanillaTransformerTokenizer())
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collator))
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        sampler.set_epoch(epoch)
        for batch in loader:
            entry = {"world": accelerator.num_processes, "epoch": epoch, "pairs": unpadded(batch)}
            write_line(Path(folder) / f"{accelerator.process_index}.jsonl", entry)
    torch.distributed.destroy_process_group()


def fully_shard_by_hand(folder: str, changes: dict[str, dict[str, Any]], steps: int) -> None:
    """Trains models, by their names, that are divided layer by layer, and the same ones whole, and saves them."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size(),))
    for name, fields in changes.items():
        whole = make_model(**fields)
        expected = train_by_hand(whole, steps, share=False)
        model = make_model(**fields)
        for module in list(model.modules()):
            if type(module).__name__ in (model._no_split_modules or ()):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = {name: type(parameter).__name__ for name, parameter in model.named_parameters()}
        fused = count_calls(loss_vanilla_transformer, "fused_cross_entropy")
        losses = train_by_hand(model, steps, share=True)
        save_sharded_model(model, str(Path(folder) / name))
        if rank() == 0:
            whole.save_pretrained(Path(folder) / f"{name}-whole")
            result = {"world": world_size(), "sharded": sharded, "losses": losses, "expected": expected, "fused": fused}
            (Path(folder) / f"{name}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def train_by_hand(model: torch.nn.Module, steps: int, *, share: bool) -> list[float]:
    """Trains on the same pairs in each process, or on this process's share of them; returns the losses of all."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = world_size() if share else 1
    losses = []
    for step in range(steps):
        source, mask = pad(make_sentences([3, 7, 5, 2], seed=step))
        labels, _ = pad(make_sentences([4, 6, 2, 5], seed=100 + step), junk=-100)
        tensors = {"input_ids": source, "attention_mask": mask, "labels": labels}
        own = {name: tensor[rank() % parts :: parts] for name, tensor in tensors.items()}
        loss = model.train()(**own, num_items_in_batch=labels.ne(-100).sum()).loss
        # Gradients are means over the processes; the loss is divided by the tokens of all already.
        (loss * parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if share:
            torch.distributed.all_reduce(total)
        losses.append(total.item())
    return losses


def count_calls(module: Any, name: str) -> list[str]:
    """Replaces a function by itself with a list of its calls."""
    function: Callable[..., Any] = getattr(module, name)
    calls: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    setattr(module, name, counted)
    return calls
