"""The complete record of one task, joined from all sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone

from chaos.history import (
    CallRecord,
    DeliveryRecord,
    Fault,
    History,
    PublishRecord,
    RowChange,
    RunRecord,
)
from delaytasks.model.moves import Status


@dataclass(slots=True)
class TaskRecord:
    call_records: list[CallRecord] = field(default_factory=list)
    run_records: list[RunRecord] = field(default_factory=list)
    changes: list[RowChange] = field(default_factory=list)
    publications: list[PublishRecord] = field(default_factory=list)
    deliveries: list[DeliveryRecord] = field(default_factory=list)

    @property
    def is_celery(self) -> bool:
        return any(record.is_celery for record in self.call_records)

    def calls(self, call: str, *answers: str) -> list[CallRecord]:
        return [
            record
            for record in self.call_records
            if record.call == call and record.answer in answers
        ]

    def claim_of(self, run: RunRecord) -> RowChange | None:
        return next((c for c in self.claims if c.version == run.version), None)

    def claim_before(self, us: int) -> RowChange | None:
        """Return the last claim until then."""
        return next((claim for claim in reversed(self.claims) if claim.at_us <= us), None)

    def has_run(self, claim: RowChange) -> bool:
        return any(run.version == claim.version for run in self.run_records)

    @property
    def claims(self) -> list[RowChange]:
        return [
            c for c in self.changes if c.status is Status.RUNNING and c.version != c.version_was
        ]

    def end_of(self, claim: RowChange) -> RowChange | None:
        """Return the change that ended `claim`, or None. A renewed lease does not end a claim."""
        after = [
            c for c in self.changes if c.version_was == claim.version and c.version != c.version_was
        ]
        return after[0] if after else None

    def at(self, us: int) -> RowChange | None:
        """Return the last change until then."""
        return next((change for change in reversed(self.changes) if change.at_us <= us), None)

    @property
    def last(self) -> RowChange | None:
        return self.changes[-1] if self.changes else None


def task_records(history: History) -> dict[int, TaskRecord]:
    records: dict[int, TaskRecord] = {}
    for record in history.call_records:
        records.setdefault(record.id, TaskRecord()).call_records.append(record)
    for ran in history.run_records:
        records.setdefault(ran.id, TaskRecord()).run_records.append(ran)
    for published in history.publications:
        records.setdefault(published.id, TaskRecord()).publications.append(published)
    for delivered in history.deliveries:
        records.setdefault(delivered.id, TaskRecord()).deliveries.append(delivered)
    for change in history.changes:  # in the order in which the database wrote the changes
        records.setdefault(change.id, TaskRecord()).changes.append(change)
    return records


def story_of(task: TaskRecord, faults: list[Fault]) -> str:
    lines: list[tuple[int, str]] = []
    for record in task.call_records:
        due = "" if record.due_us is None else f", due {_clock(record.due_us)}"
        lines.append((record.answered_us, f"producer: {record.call}{due}: {record.answer}"))
    for run in task.run_records:
        lines.append((run.began_us, f"processor: version {run.version} begins in {run.worker}"))
        if run.ended_us is not None:
            lines.append((run.ended_us, f"processor: version {run.version} ends"))
    lines += [(each.at_us, "worker: publishes the message") for each in task.publications]
    lines += [(each.at_us, "Celery task: begins") for each in task.deliveries]
    for change in task.changes:
        was = "new" if change.was is None else f"{change.was} {change.version_was}"
        lease = (
            ""
            if change.lease_until_us is None
            else f", lease until {_clock(change.lease_until_us)}"
        )
        row = f"row: {was} -> {change.status} {change.version}, due {_clock(change.due_us)}"
        row += f", lapses {change.lapses}"
        row += f", {change.worker}" if change.worker else ""
        lines.append((change.at_us, row + lease))
    if lines:
        first, last = min(lines)[0], max(lines)[0]
        lines += [
            (fault.from_us, f"fault: {fault.kind} of {fault.target} until {_clock(fault.until_us)}")
            for fault in faults
            if fault.until_us >= first and fault.from_us <= last
        ]
    return "\n".join(f"  {_clock(at)} {text}" for at, text in sorted(lines))


def _clock(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, timezone.utc).strftime("%H:%M:%S.%f")
