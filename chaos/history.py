"""What happened: what producers were told, what processors did, what became of rows, and which faults there were.

All times are microseconds by the database's clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from delaytasks.core.states import Status

Call = Literal["schedule", "reschedule", "cancel", "retry"]
#: Refused, or rolled back: nothing was done. Unknown: the answer was lost.
Answer = Literal["ok", "failed", "unknown"]
#: What became of those whom a fault hit. They are dead from then on; they could not renew a lease as long as it lasted,
#: since they stood still, or had no way to the database; they were asked to end, and finish what they have.
Effect = Literal["none", "dead", "away", "ending"]
#: Of `key_owners`: everybody.
ALL = ("",)


@dataclass(frozen=True, slots=True)
class Told:
    """What a producer asked for, and what it was told."""

    id: int
    call: Call
    answer: Answer
    asked_us: int
    answered_us: int
    #: Not before; of a call that names no time, none.
    due_us: int | None = None
    #: How often its ladder lets it run.
    most_runs: int = 1


@dataclass(frozen=True, slots=True)
class Ran:
    """What a processor did. Without an end it was killed, or the test ended first."""

    id: int
    #: Of its claim.
    version: int
    worker: str
    began_us: int
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A row that was written or changed, as the database's own trigger saw it."""

    id: int
    at_us: int
    was: Status | None
    status: Status
    version_was: int | None
    version: int
    attempts: int
    lapses: int
    due_us: int
    lease_until_us: int | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was broken, from its first effect to its last."""

    kind: str
    target: str
    from_us: int
    until_us: int
    #: On those who may hold leases.
    effect: Effect = "none"
    #: Whom it hit: parts of the names by which rows know the holders of their leases.
    key_owners: tuple[str, ...] = ()


@dataclass
class History:
    told: list[Told] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    #: Processes that ran nothing at the end, when all had something to do.
    hung: list[str] = field(default_factory=list)


_KINDS: dict[str, type[Told | Ran]] = {"told": Told, "ran": Ran}


class Notebook:
    """One process writes down what it knows, a line at a time. A process that is killed loses nothing it wrote."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def note(self, one: Told | Ran) -> None:
        kind = next(name for name, type_ in _KINDS.items() if isinstance(one, type_))
        os.write(self._file, (json.dumps({"kind": kind, **asdict(one)}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path, changes: Iterable[Change]) -> History:
    """What all processes wrote down. A run's end replaces its begin."""
    history = History(changes=list(changes))
    runs: dict[tuple[int, int, str, int], Ran] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.open():
            fields: dict[str, Any] = json.loads(line)
            one = _KINDS[fields.pop("kind")](**fields)
            if isinstance(one, Ran):
                runs[one.id, one.version, one.worker, one.began_us] = one
            else:
                history.told.append(one)
    history.ran = sorted(runs.values(), key=lambda run: run.began_us)
    history.told.sort(key=lambda told: told.asked_us)
    return history
