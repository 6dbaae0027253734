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

from chaos.failpoints.places import PLACES, DatabaseAddress, Who
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
LASTS_S: dict[Act, float] = {"kill": 0, "raise": LEASE_S, "sleep": SLEEP_S}


class FailpointError(Exception):
    """Raised at a failpoint by an order to `raise`."""


class Orders:
    """The orders as seen by the processes that carry them out."""

    def __init__(self, folder: Path, is_producer: bool = False) -> None:
        self._folder = folder
        self._is_producer = is_producer
        self._main = os.getpid()
        self._reached: Counter[tuple[str, str]] = Counter()
        for place in PLACES:
            for at in place.at:
                self._wrap(place, f"delaytasks.{at}")

    def _wrap(self, place: DatabaseAddress, at: str) -> None:
        where, _, name = at.rpartition(".")
        owner = resolve_name(where)
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if place.side == "before":
                self._reach(place)
            answer = method(*args, **kwargs)
            if isinstance(answer, GeneratorType):
                return self._each(place, answer)
            if place.side == "after":
                self._reach(place)
            return answer

        setattr(owner, name, wrapped)

    def _each(self, place: DatabaseAddress, answers: Iterator[Any]) -> Iterator[Any]:
        for answer in answers:
            if place.side == "after":
                self._reach(place)
            yield answer

    @property
    def _who(self) -> Who:
        if self._is_producer:
            return "producer"
        return "main" if os.getpid() == self._main else "pool"

    def _reach(self, place: DatabaseAddress) -> None:
        order = self._folder / place.name
        try:
            text = order.read_text()
            if place.who != self._who:
                return
            self._reached[place.name, text] += 1
            act, nth, _serial = text.split()
            if self._reached[place.name, text] < int(nth):
                return
            order.unlink()  # another process may have removed it already
        except (FileNotFoundError, ValueError):
            return
        if act == "kill":
            die(place.name)
        elif act == "sleep":
            tell(self._folder, f"{place.name}: sleep", SLEEP_S, "away")
            time.sleep(SLEEP_S)
        else:
            tell(self._folder, f"{place.name}: raise", 2 * LEASE_S, "away")
            raise FailpointError(place.name)


def tell(folder: Path, kind: str, lasts_s: float, effect: Effect) -> None:
    """Record a fault that affects the leases of this process and of its child processes."""
    pid = os.getpid()
    key_owners = tuple(f"/{holder}-" for holder in (pid, *children_of(pid)))
    fault = Fault(
        kind, f"process {pid}", now_us(), now_us() + int(lasts_s * 1e6), effect, key_owners
    )
    with (folder / FAULTS).open("a") as file:
        file.write(json.dumps(asdict(fault)) + "\n")


def die(kind: str) -> None:
    """Kill this process. Its other tasks keep their leases for at most one lease."""
    tell(Path(os.environ[VARIABLE]), f"{kind}: kill", LEASE_S, "dead")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the signal arrives


def give(folder: Path, name: str, act: Act, nth: int) -> Path:
    """Write an order, and return its file."""
    path = folder / name
    draft = folder / ".draft"
    draft.write_text(f"{act} {nth} {time.monotonic_ns()}")
    draft.rename(path)
    return path
