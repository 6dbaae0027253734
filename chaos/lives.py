"""The complete record of one task, joined from all sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone

from chaos.history import Change, Fault, History, Ran, Told
from delaytasks.core.states import Status


@dataclass(slots=True)
class Life:
    told: list[Told] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def calls(self, call: str, *answers: str) -> list[Told]:
        return [told for told in self.told if told.call == call and told.answer in answers]

    def claim_of(self, run: Ran) -> Change | None:
        return next((c for c in self.claims if c.version == run.version), None)

    def has_run(self, claim: Change) -> bool:
        return any(run.version == claim.version for run in self.ran)

    @property
    def claims(self) -> list[Change]:
        return [
            c for c in self.changes if c.status is Status.RUNNING and c.version != c.version_was
        ]

    def end_of(self, claim: Change) -> Change | None:
        """Return the change that ended `claim`, or None. A renewed lease does not end a claim."""
        after = [
            c for c in self.changes if c.version_was == claim.version and c.version != c.version_was
        ]
        return after[0] if after else None

    def at(self, us: int) -> Change | None:
        """Return the last change until then."""
        return next((change for change in reversed(self.changes) if change.at_us <= us), None)

    @property
    def last(self) -> Change | None:
        return self.changes[-1] if self.changes else None


def lives_of(history: History) -> dict[int, Life]:
    lives: dict[int, Life] = {}
    for told in history.told:
        lives.setdefault(told.id, Life()).told.append(told)
    for ran in history.ran:
        lives.setdefault(ran.id, Life()).ran.append(ran)
    for change in history.changes:  # in the order in which the database wrote the changes
        lives.setdefault(change.id, Life()).changes.append(change)
    return lives


def story_of(life: Life, faults: list[Fault]) -> str:
    lines: list[tuple[int, str]] = []
    for told in life.told:
        due = "" if told.due_us is None else f", due {_clock(told.due_us)}"
        lines.append((told.answered_us, f"producer: {told.call}{due}: {told.answer}"))
    for run in life.ran:
        lines.append((run.began_us, f"processor: version {run.version} begins in {run.worker}"))
        if run.ended_us is not None:
            lines.append((run.ended_us, f"processor: version {run.version} ends"))
    for change in life.changes:
        was = "new" if change.was is None else f"{change.was} {change.version_was}"
        lease = (
            ""
            if change.lease_until_us is None
            else f", lease until {_clock(change.lease_until_us)}"
        )
        row = f"row: {was} -> {change.status} {change.version}, due {_clock(change.due_us)}, lapses {change.lapses}"
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
