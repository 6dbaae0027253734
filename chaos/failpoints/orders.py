"""Orders to fail. An order is a file with the name of a failpoint.

The first process that reaches the failpoint carries the order out and removes the file. `echo "kill
3 x" > FOLDER/claimed` kills the first process that has claimed a chunk for the third time, if it
runs with DELAYTASKS_TEST_FAILPOINTS=FOLDER and imports this module, as `chaos.failpoints.project`
does. Other acts are `raise` and `sleep`, which takes longer than a lease.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from types import GeneratorType
from typing import Any, Literal

from chaos.failpoints.catalogue import FAILPOINTS, Failpoint, ProcessKind
from chaos.history import Effect, Fault
from chaos.pids import children_of
from chaos.project import now_us

#: The file in the folder that lists the orders that were carried out.
FAULTS = "faults.jsonl"
VARIABLE = "DELAYTASKS_TEST_FAILPOINTS"
#: The lease of the deployments under test.
LEASE_S = 2.0
SLEEP_S = 1.5 * LEASE_S


def faults(folder: Path) -> list[Fault]:
    path = folder / FAULTS
    return (
        [Fault(**json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


Act = Literal["kill", "raise", "sleep"]
#: The additional recovery time. Rows that an error leaves behind in a living process are recovered
#: one lease later.
EXTRA_RECOVERY_S: dict[Act, float] = {"kill": 0, "raise": LEASE_S, "sleep": SLEEP_S}


class FailpointError(Exception):
    """Raised at a failpoint by an order to `raise`."""


class Orders:
    """The orders as seen by the processes that carry them out."""

    def __init__(self, folder: Path, is_producer: bool = False) -> None:
        self._folder = folder
        self._is_producer = is_producer
        self._main = os.getpid()
        self._reached: Counter[tuple[str, str]] = Counter()
        for failpoint in FAILPOINTS:
            for path in failpoint.methods:
                self._wrap(failpoint, f"delaytasks.{path}")

    def _wrap(self, failpoint: Failpoint, path: str) -> None:
        where, _, name = path.rpartition(".")
        owner = resolve_name(where)
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if failpoint.side == "before":
                self._reach(failpoint)
            answer = method(*args, **kwargs)
            if isinstance(answer, GeneratorType):
                return self._each(failpoint, answer)
            if failpoint.side == "after":
                self._reach(failpoint)
            return answer

        setattr(owner, name, wrapped)

    def _each(self, failpoint: Failpoint, answers: Iterator[Any]) -> Iterator[Any]:
        for answer in answers:
            if failpoint.side == "after":
                self._reach(failpoint)
            yield answer

    @property
    def _process_kind(self) -> ProcessKind:
        if self._is_producer:
            return "producer"
        return "main" if os.getpid() == self._main else "pool"

    def _reach(self, failpoint: Failpoint) -> None:
        order = self._folder / failpoint.name
        try:
            text = order.read_text()
            if failpoint.process_kind != self._process_kind:
                return
            self._reached[failpoint.name, text] += 1
            act, nth, _serial = text.split()
            if self._reached[failpoint.name, text] < int(nth):
                return
            order.unlink()  # another process may have removed it already
        except (FileNotFoundError, ValueError):
            return
        if act == "kill":
            kill_this_process(failpoint.name)
        elif act == "sleep":
            record_fault(self._folder, f"{failpoint.name}: sleep", SLEEP_S, "away")
            time.sleep(SLEEP_S)
        else:
            record_fault(self._folder, f"{failpoint.name}: raise", 2 * LEASE_S, "away")
            raise FailpointError(failpoint.name)


def record_fault(folder: Path, kind: str, lasts_s: float, effect: Effect) -> None:
    """Record a fault that affects the leases of this process and of its child processes."""
    pid = os.getpid()
    key_owners = tuple(f"/{holder}-" for holder in (pid, *children_of(pid)))
    fault = Fault(
        kind,
        f"process {pid}",
        now_us(),
        now_us() + int(lasts_s * 1e6),
        effect,
        key_owners,
        # Redis keeps what a dead worker has received until the end of the visibility timeout.
        loses_messages=effect == "dead",
    )
    with (folder / FAULTS).open("a") as file:
        file.write(json.dumps(asdict(fault)) + "\n")


def kill_this_process(kind: str) -> None:
    """Kill this process. Its other tasks keep their leases for at most one lease."""
    record_fault(Path(os.environ[VARIABLE]), f"{kind}: kill", LEASE_S, "dead")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the signal arrives


def write_order(folder: Path, name: str, act: Act, nth: int) -> Path:
    """Write an order, and return its file."""
    path = folder / name
    draft = folder / ".draft"
    draft.write_text(f"{act} {nth} {time.monotonic_ns()}")
    draft.rename(path)
    return path
