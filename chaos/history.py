"""The recorded history of a run: calls, runs, row changes and faults.

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
#: "failed" means refused or rolled back, so nothing was done. "unknown" means that the answer was
#: lost.
Answer = Literal["ok", "failed", "unknown"]
#: The effect of a fault on key owners. "dead": they end immediately. "away": they cannot renew a
#: lease during the fault, because they are frozen or cannot reach the database. "ending": they are
#: asked to end, and finish their chunks.
Effect = Literal["none", "dead", "away", "ending"]
#: The value of `key_owners` that matches every owner.
ALL = ("",)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A producer's call and its answer."""

    id: int
    call: Call
    answer: Answer
    asked_us: int
    answered_us: int
    #: The requested due time; None if the call names no time.
    due_us: int | None = None
    #: The number of runs that the retry schedule allows.
    most_runs: int = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One call of a processor. It has no end if the process was killed or the run ended first."""

    id: int
    #: The version of the row's claim.
    version: int
    worker: str
    began_us: int
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row that was inserted or updated, as recorded by the database's trigger."""

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
    """An injected fault, from its first effect to its last."""

    kind: str
    target: str
    from_us: int
    until_us: int
    #: The effect on the owners of leases.
    effect: Effect = "none"
    #: The affected lease owners: substrings of the names in the rows.
    key_owners: tuple[str, ...] = ()


@dataclass
class History:
    call_records: list[CallRecord] = field(default_factory=list)
    run_records: list[RunRecord] = field(default_factory=list)
    changes: list[RowChange] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    #: Processes that ran no task at the end, although there was enough work for all.
    hung: list[str] = field(default_factory=list)


_KINDS: dict[str, type[CallRecord | RunRecord]] = {"call": CallRecord, "run": RunRecord}


class Notebook:
    """Append the records of one process to a file, one per line.

    A killed process loses no written line.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def note(self, one: CallRecord | RunRecord) -> None:
        kind = next(name for name, type_ in _KINDS.items() if isinstance(one, type_))
        os.write(self._file, (json.dumps({"kind": kind, **asdict(one)}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path, changes: Iterable[RowChange]) -> History:
    """Read the records of all processes. The end of a run replaces its begin."""
    history = History(changes=list(changes))
    runs: dict[tuple[int, int, str, int], RunRecord] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            fields: dict[str, Any] = json.loads(line)
            one = _KINDS[fields.pop("kind")](**fields)
            if isinstance(one, RunRecord):
                runs[one.id, one.version, one.worker, one.began_us] = one
            else:
                history.call_records.append(one)
    history.run_records = sorted(runs.values(), key=lambda run: run.began_us)
    history.call_records.sort(key=lambda record: record.asked_us)
    return history
