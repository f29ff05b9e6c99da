"""Groups of processes that train together, started by torchrun's own agent without the seconds that imports take.

One process imports everything, trains nothing itself, and for each request forks a group: the agent (`elastic_launch`,
which is what torchrun calls) and the ranks that the agent forks in turn. Run as a program, this file is that process;
imported, it is what tests ask it with.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SCRIPTS = TESTS.parents[1] / "scripts"
TIMEOUT = 120.0
# How a process ends that kills itself, by the signal for a file that grows too large as well.
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)


class Launcher:
    """Starts groups of processes that run functions of a module, logs into a folder, and says how they ended."""

    def __init__(self, folder: Path, module: str = "rank_programs", environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.groups = 0
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self.server = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), module], **options)

    def close(self) -> None:
        self.server.kill()
        self.server.communicate(timeout=2 * TIMEOUT)

    def run(
        self,
        program: str,
        options: dict[str, Any],
        *,
        processes: int = 2,
        environment: dict[str, str] | None = None,
        after: float | None = None,
        ends: Sequence[int] = (0,),
    ) -> str:
        """What a function of the module says, run in several processes, or in one that knows of no others.

        The group is killed from outside `after` so many seconds; any end but those of `ends` fails the test.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.groups += 1
        log = self.folder / f"group-{self.groups}.log"
        request: dict[str, Any] = {"program": program, "options": options, "processes": processes, "log": str(log)}
        request |= {"environment": environment or {}, "after": after}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        self.status = int(self.server.stdout.readline())
        said = log.read_text() if log.exists() else ""
        assert self.status in ends, f"{program} {options} ended with status {self.status} instead of {ends}\n{said}"
        return said


@contextlib.contextmanager
def launcher(folder: Path, **settings: Any) -> Iterator[Launcher]:
    """A launcher that ends with the block."""
    with contextlib.closing(Launcher(folder, **settings)) as instance:
        yield instance


def write_pairs(folder: Path, name: str, count: int) -> list[str]:
    """Two files of as many lines, of 1 to 9 words each."""
    chooser = random.Random(name)
    words = ["one", "two", "three", "four", "five", "six"]
    paths = [folder / f"{name}.{language}" for language in ("en", "de")]
    for path in paths:
        lines = (" ".join(chooser.choices(words, k=chooser.randint(1, 9))) for _ in range(count))
        path.write_text("".join(f"{line}\n" for line in lines))
    return [str(path) for path in paths]


def lead_group(request: dict[str, Any]) -> None:
    """Becomes the leader of a group of processes: the agent of several ranks, or the only one."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    vars(dynamic_rendezvous)["_delay"] = lambda seconds: time.sleep(0.01)  # nobody else wants to join
    status = 1
    try:
        server = os.getppid()
        os.setsid()
        end_with(server)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= request["environment"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        program = getattr(importlib.import_module(sys.argv[1]), request["program"])
        if request["processes"] == 1:
            program(**request["options"])
        else:
            settings = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": request["processes"], "max_restarts": 0}
            settings |= {"run_id": str(os.getpid()), "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
            settings |= {"monitor_interval": 0.02, "start_method": "fork", "local_addr": "localhost"}
            elastic_launch(LaunchConfig(**settings), run_rank)(program, request["options"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if status == 1:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_with(server: int) -> None:
    """Ends this group within a second after the process that forked it has been killed."""

    def check(*_: Any) -> None:
        if os.getppid() != server:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    signal.signal(signal.SIGALRM, check)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def run_rank(program: Any, options: dict[str, Any]) -> None:
    """What the agent runs in each rank."""
    try:
        program(**options)
    except BaseException:
        # The agent would keep it to itself.
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()


def wait_for_group(leader: int) -> int:
    """Waits until its leader has ended, and ends all others of it, or the whole group after too long a time."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        process, status = os.waitpid(leader, os.WNOHANG)
        late = time.monotonic() > deadline
        if process or late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        if process:
            return os.waitstatus_to_exitcode(status)
        if late:
            os.waitpid(leader, 0)
            return 124
        time.sleep(0.005)


def serve() -> None:
    """Forks a group for each line of standard input, and answers with the exit status of its leader."""
    sys.path[:0] = [str(SCRIPTS), str(TESTS)]
    importlib.import_module(sys.argv[1])
    # Else each training does it.
    for name in ("matplotlib.backends.backend_agg", "torch.distributed.launcher.api"):
        importlib.import_module(name)
    importlib.import_module("vanilla_transformer.hub.card")._get_template()
    gc.collect()
    gc.freeze()  # else each training looks through all that the imports left, which takes half a second
    for line in sys.stdin:
        request = json.loads(line)
        leader = os.fork()
        if leader == 0:
            lead_group(request)
        if request["after"] is not None:
            time.sleep(request["after"])
            os.kill(leader, signal.SIGKILL)  # which does nothing to one that has ended, but was not waited for
        print(wait_for_group(leader), flush=True)


if __name__ == "__main__":
    serve()
