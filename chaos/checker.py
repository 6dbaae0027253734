"""Check a history against the promises.

Every acknowledged task runs at least once and never early, one finish is accepted for each claim,
and a fault explains every additional run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.celery_rules import CeleryRules
from chaos.claims_ahead import claimed_ahead
from chaos.explanations import Explanations, lost_lease
from chaos.history import History, RowChange
from chaos.occurrence_rules import violations_of
from chaos.task_records import TaskRecord, story_of, task_records
from chaos.violation import Violation
from delaytasks.model.moves import FINISHED, MOVES, Status

#: The pairs (source, target) of all allowed moves.
_LEGAL = {(source, move.target) for move in MOVES.values() for source in move.sources}
#: How long a due task may wait before it counts as stuck: a lease, a sweep, a dispatch and some
#: tolerance.
WHILE_US = 10_000_000
#: How many findings are printed with their stories. A broken run has thousands of findings, and
#: their stories take minutes.
MOST_STORIES = 20


class Finding(NamedTuple):
    violation: Violation
    id: int
    #: All recorded facts about the task, ordered by time. Only the first findings have a story.
    story: str

    def __str__(self) -> str:
        invariant, kind, text = self.violation
        return f"{invariant} {kind}: task {self.id}: {text}\n{self.story}"


@dataclass
class Verdict:
    tasks: int = 0
    runs: int = 0
    #: Runs beyond the requested ones that a fault explains.
    explained: int = 0
    #: Rows that a process claimed while it ran another row.
    claimed_ahead: int = 0
    #: Messages of Celery tasks that workers published.
    published: int = 0
    findings: list[Finding] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(finding.violation.kind for finding in self.findings)

    def __str__(self) -> str:
        counts = (
            ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts().items()))
            or "nothing found"
        )
        summary = (
            f"{self.tasks:,} tasks, {self.runs:,} runs, "
            f"{self.explained} of them repeated because of a fault, "
            f"{self.claimed_ahead:,} rows claimed ahead, "
            f"{self.published:,} Celery messages published: {counts}"
        )
        return "\n\n".join([summary, *map(str, self.findings[:MOST_STORIES])])


class Checker:
    def __init__(
        self,
        history: History,
        max_lost_leases: int = 5,
        quiet_us: int | None = None,
        by_us: int | None = None,
    ) -> None:
        """Check `history`.

        `quiet_us` is the time by which all work must be over. `by_us` is the time by which every
        task that was due before must be finished.
        """
        self._history = history
        self._explanations = Explanations(history.faults)
        self._max_lost_leases = max_lost_leases
        self._quiet_us = quiet_us
        self._by_us = by_us
        celery = CeleryRules(history.faults, self._is_explained)
        self._rules: tuple[Callable[[TaskRecord], Iterator[Violation]], ...] = (
            self._acknowledged_runs,
            self._nothing_else_runs,
            self._never_early,
            self._legal_moves,
            self._one_lease,
            self._extra_runs_are_explained,
            self._bounded,
            self._quiet,
            celery.published,
            celery.revoked,
            celery.once,
            celery.delivered,
        )

    def verdict(self) -> Verdict:
        history, tasks = self._history, task_records(self._history)
        verdict = Verdict(len(tasks), len(history.run_records))
        verdict.claimed_ahead = claimed_ahead(history)
        verdict.published = len(history.publications)
        for id, task in tasks.items():
            violations = [violation for rule in self._rules for violation in rule(task)]
            again = [claim for claim in self._lapsed(task) if task.has_run(claim)]
            verdict.explained += sum(self._is_explained(task, claim) for claim in again)
            verdict.explained += len(self._forgotten(task))
            for violation in violations:
                story = (
                    story_of(task, history.faults) if len(verdict.findings) < MOST_STORIES else ""
                )
                verdict.findings.append(Finding(violation, id, story))
        for occurrences in history.occurrences:
            verdict.findings += [Finding(each, 0, "") for each in violations_of(occurrences)]
        for process in history.hung:
            verdict.findings.append(
                Finding(Violation("I8", "hung", f"{process} is alive but runs no task"), 0, "")
            )
        return verdict

    def story(self, id: int) -> str:
        """Return all recorded facts about a task."""
        return story_of(task_records(self._history)[id], self._history.faults)

    # -- promises to callers ----------------------------------------------------------------------

    def _acknowledged_runs(self, task: TaskRecord) -> Iterator[Violation]:
        if not task.calls("schedule", "ok"):
            return
        if task.last is None:
            yield Violation("I1", "lost", "its schedule was acknowledged, but it has no row")
        elif (
            task.last.status in (Status.DONE, Status.FAILED)
            and not (task.run_records or task.publications)
            and not self._is_given_up(task.last)
        ):
            yield Violation("I1", "lost", f"it is {task.last.status.name} but it never ran")
        elif task.last.status is Status.CANCELLED and not (
            task.calls("cancel", "ok", "unknown") or task.calls("revoke", "ok", "unknown")
        ):
            yield Violation("I1", "lost", "it is CANCELLED, but no caller cancelled it")

    def _is_given_up(self, last: RowChange) -> bool:
        """Return whether workers died between claim and run as often as is allowed."""
        return last.status is Status.FAILED and last.lapses >= self._max_lost_leases

    def _nothing_else_runs(self, task: TaskRecord) -> Iterator[Violation]:
        if not task.calls("schedule", "ok", "unknown"):
            if task.run_records or task.publications:
                yield Violation(
                    "I2", "unexpected", "it ran, but its schedule was refused or rolled back"
                )
            elif task.last is not None:
                yield Violation(
                    "I2", "unexpected", "its schedule was refused or rolled back, but it has a row"
                )
        for run in task.run_records:
            if (
                task.changes
                and task.claim_of(run) is None
                and run.version not in self._forgotten(task)
            ):
                yield Violation(
                    "I4", "unexpected", f"the run of version {run.version} had no claim"
                )
        for cancel in task.calls("cancel", "ok"):
            again = [record.answered_us for record in task.calls("rerun", "ok", "unknown")]
            late = [
                r
                for r in task.run_records
                if r.began_us > cancel.answered_us and not any(a < r.began_us for a in again)
            ]
            if late:
                yield Violation("I1", "unexpected", "it ran after its cancel was acknowledged")

    def _never_early(self, task: TaskRecord) -> Iterator[Violation]:
        asked = [
            record
            for record in task.call_records
            if record.due_us is not None and record.answer != "failed"
        ]
        for run in task.run_records:
            claim = task.claim_of(run)
            if claim is not None and run.began_us < claim.due_us:
                yield Violation(
                    "I3",
                    "early",
                    f"version {run.version} began {claim.due_us - run.began_us} us before its time",
                )
                continue
            moves = task.calls("reschedule", "unknown") + task.calls("rerun", "unknown")
            if any(record.due_us is None and record.asked_us <= run.began_us for record in moves):
                continue  # its due time may have changed, and the new one is unknown
            settled = [
                record
                for record in asked
                if record.answer == "ok" and record.answered_us <= run.began_us
            ]
            open_ones = [
                t.due_us
                for t in asked
                if t not in settled and t.asked_us <= run.began_us and t.due_us
            ]
            dues = open_ones + [record.due_us for record in settled[-1:] if record.due_us]
            if dues and run.began_us < min(dues):
                yield Violation(
                    "I3",
                    "early",
                    f"version {run.version} began {min(dues) - run.began_us} us "
                    "before the requested time",
                )

    # -- the row ----------------------------------------------------------------------------------

    def _legal_moves(self, task: TaskRecord) -> Iterator[Violation]:
        for before, change in zip([None, *task.changes], task.changes, strict=False):
            if change.was is None:
                continue
            if before is not None and (before.status, before.version) != (
                change.was,
                change.version_was,
            ):
                yield Violation(
                    "I4",
                    "overwritten",
                    f"version {before.version} was not what version {change.version} came from",
                )
            if change.version == change.version_was:
                if change.status is not change.was:
                    yield Violation(
                        "I4", "unfenced", f"{change.was} became {change.status} under one version"
                    )
            elif (change.was, change.status) not in _LEGAL:
                kind = (
                    "double finish"
                    if change.was in FINISHED and change.status in FINISHED
                    else "illegal move"
                )
                yield Violation("I4", kind, f"{change.was} became {change.status}")

    def _one_lease(self, task: TaskRecord) -> Iterator[Violation]:
        """Find leases that ended too early.

        A lease may end at its time, with its row's settlement, or with the death of its owner.
        """
        for claim in self._lapsed(task):
            end, lease_us = task.end_of(claim), self._lease_of(task, claim)
            if end is None or lease_us is None or end.at_us >= lease_us:
                continue
            if not self._explanations.has_ended(lost_lease(claim, task.changes, end)):
                yield Violation(
                    "I5",
                    "two leases",
                    f"version {claim.version} was recovered {lease_us - end.at_us} us "
                    "before its lease ended",
                )

    def _lease_of(self, task: TaskRecord, claim: RowChange) -> int | None:
        """Return the lease's end after its last renewal."""
        return [c.lease_until_us for c in task.changes if c.version == claim.version][-1]

    # -- extra runs -------------------------------------------------------------------------------

    def _lapsed(self, task: TaskRecord) -> list[RowChange]:
        """Return the claims that were never settled."""
        ends = ((claim, task.end_of(claim)) for claim in task.claims)
        return [claim for claim, end in ends if end is not None and end.lapses > claim.lapses]

    def _forgotten(self, task: TaskRecord) -> set[int]:
        """Return the versions of the runs whose claims a crash of the database has lost.

        On PostgreSQL the version of a claim is its time.
        """
        return {
            run.version
            for run in task.run_records
            if task.claim_of(run) is None
            and any(fault.may_lose_claim(run.version) for fault in self._history.faults)
        }

    def _is_explained(self, task: TaskRecord, claim: RowChange) -> bool:
        end = task.end_of(claim)
        return end is not None and self._explanations.explain(lost_lease(claim, task.changes, end))

    def _extra_runs_are_explained(self, task: TaskRecord) -> Iterator[Violation]:
        for version in sorted({run.version for run in task.run_records}):
            runs = [run for run in task.run_records if run.version == version]
            if len(runs) > 1:
                yield Violation("I6", "duplicated", f"version {version} ran {len(runs)} times")
        for claim in self._lapsed(task):
            if task.has_run(claim) and not self._is_explained(task, claim):
                text = (
                    f"version {claim.version} of {claim.worker} ran and lost its lease, "
                    "but no fault of its owner explains that"
                )
                yield Violation("I6", "duplicated", text)
        for run in task.run_records:
            if (taken := task.claim_of(run)) is not None and self._never_ran(task, taken):
                yield Violation(
                    "I6", "duplicated", f"version {run.version} ran, but was given back as not run"
                )

    def _never_ran(self, task: TaskRecord, claim: RowChange) -> bool:
        """Return whether the row was given back unrun: its runs decrease and its worker is
        removed.
        """
        end = task.end_of(claim)
        if end is None or end.was is not Status.RUNNING or self._is_explained(task, claim):
            return False
        return end.runs < claim.runs and end.worker is None

    def _bounded(self, task: TaskRecord) -> Iterator[Violation]:
        most = max((change.lapses for change in task.changes), default=0)
        lapses_in_a_row = longest = 0
        for claim in task.claims:
            end = task.end_of(claim)
            lapsed = end is None or end.lapses > claim.lapses or end.status is Status.RUNNING
            lapses_in_a_row = lapses_in_a_row + 1 if lapsed else 0
            longest = max(longest, lapses_in_a_row)
        if max(most, longest) > self._max_lost_leases:
            yield Violation(
                "I7", "too often", f"it lost its lease {max(most, longest)} times in a row"
            )
        allowed = max(
            (record.most_runs for record in task.calls("schedule", "ok", "unknown")), default=1
        )
        settled = (
            {run.version for run in task.run_records}
            - {claim.version for claim in self._lapsed(task)}
            - self._forgotten(task)
        )
        again = len(task.calls("rerun", "ok", "unknown"))
        if len(settled) > allowed * (1 + again):
            yield Violation(
                "I7", "too often", f"it ran {len(settled)} times to its end, but may run {allowed}"
            )

    def _quiet(self, task: TaskRecord) -> Iterator[Violation]:
        last = task.last
        if self._quiet_us is None or last is None:
            return
        if last.status is Status.RUNNING and (last.lease_until_us or 0) < self._quiet_us:
            yield Violation("I8", "stuck", "it is RUNNING, but its lease is over")
        elif last.status is Status.NOT_COMPLETE and last.due_us < self._quiet_us:
            yield Violation("I8", "stuck", "it is overdue")
        else:
            yield from self._in_time(task)

    def _in_time(self, task: TaskRecord) -> Iterator[Violation]:
        by_us = self._by_us
        if by_us is None or (then := task.at(by_us)) is None:
            return
        if (
            then.status not in (Status.NOT_COMPLETE, Status.RUNNING)
            or then.due_us > by_us - WHILE_US
        ):
            return
        text = f"it was due for {(by_us - then.due_us) / 1e6:.1f} s at the deadline"
        ended = next((c for c in task.changes if c.at_us > by_us and c.status in FINISHED), None)
        if ended is None:
            yield Violation("I8", "stuck", f"{text}, and is not finished")
        else:
            yield Violation(
                "I8", "late", f"{text}, and was finished {(ended.at_us - by_us) / 1e6:.1f} s later"
            )
