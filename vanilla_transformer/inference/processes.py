"""Many processes that divide a work: what torchrun, accelerate or the like say of them, and what they tell each other.

They meet at few points, through a process group of torch's gloo: it works on every machine, and ends with an error
where one of them has died. It stays open until the process ends: one after another would find each other's addresses.
"""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# How long the others wait: the first process may read a large corpus, or another one be slower. A dead one ends it.
_PATIENCE = timedelta(days=1)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Processes:
    """Which of so many processes this one is, counted from 0."""

    rank: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls) -> "Processes":
        """What the launcher announces in RANK and WORLD_SIZE; one process without a launcher."""
        count = int(os.environ.get("WORLD_SIZE") or 1)
        if count == 1:
            return cls()
        if not os.environ.get("RANK"):
            raise ValueError(f"WORLD_SIZE is {count}, but RANK is missing: start the processes with torchrun.")
        return cls(int(os.environ["RANK"]), count)

    def agree(self, function: Callable[[], Answer]) -> Answer:
        """What a function returns in the first process, for all; it is called there alone.

        If it fails, the first process says why, and the others end with status 2.
        """
        if self.count == 1:
            return function()
        error: Exception | None = None
        answers: list[tuple[bool, Answer | None]] = [(False, None)]
        _connect()
        if self.rank == 0:
            try:
                answers = [(True, function())]
            except Exception as exception:
                error = exception
        torch.distributed.broadcast_object_list(answers, src=0)
        if error is not None:
            raise error
        is_found, answer = answers[0]
        if not is_found:
            raise SystemExit(2)
        return answer  # type: ignore[return-value]

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function in all. Where it fails, the process says why, and the others end with status 2."""
        error: Exception | None = None
        try:
            function()
        except Exception as exception:
            error = exception
        has_failed = self.gather(error is not None)
        if error is not None:
            raise error
        if any(has_failed):
            raise SystemExit(2)

    def gather(self, value: Answer) -> list[Answer]:
        """The values of all processes, in their order, in each of them."""
        if self.count == 1:
            return [value]
        values: list[Answer | None] = [None] * self.count
        _connect()
        torch.distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def share(self, total: int) -> range:
        """This process's part of so many items, one after the other."""
        return range(self.rank * total // self.count, (self.rank + 1) * total // self.count)


def _connect() -> None:
    if torch.distributed.is_initialized():
        return
    place: dict[str, Any] = {}
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives its processes, and has the addresses of those that a restart has replaced. Only
        # processes of one machine were all restarted so many times.
        store, place["rank"], place["world_size"] = next(rendezvous("env://"))
        place["store"] = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    torch.distributed.init_process_group("gloo", timeout=_PATIENCE, **place)
    atexit.register(torch.distributed.destroy_process_group)
