"""Check a history against the promises of docs/guarantees.md.

Every acknowledged task runs at least once and never early, one finish is accepted for each claim,
and a fault explains every additional run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import NamedTuple

from chaos.history import KILL, MOST_RUNS, STALL, Answer, Claim, Fault, History, Recurs, TaskRecord
from delaytasks.model.moves import FINISHED, LIVE, MOVES, Status

#: The pairs (source, target) of all allowed moves.
_LEGAL = {(source, move.target) for move in MOVES.values() for source in move.sources}
#: How long a due task may wait before it counts as stuck: a lease, a sweep, a dispatch and some
#: tolerance.
WHILE_US = 10_000_000
#: Leases are renewed after each third of their duration. An owner that cannot reach the database
#: for a shorter time misses no renewal.
MISSED = 1 / 3
#: The rows of a worker are released 15 s after its last report, which may be 6 s old when it is cut
#: off.
SILENT_US = 9_000_000
#: After the end of a fault, components notice and repair its effects: the publisher connects again,
#: and an operation on the broker reaches its time limit.
AFTERMATH_US = 10_000_000
#: How long a message may wait at the broker or in a worker until its task begins.
IN_BROKER_US = 30_000_000
#: A wait of a due task that is longer is attributed to a fault.
LATE_US = 100_000
#: The answers of calls that may have had their effect.
_MAYBE: tuple[Answer, Answer] = ("ok", "unknown")
#: How many findings are printed with their stories. A broken run has thousands of findings, and
#: their stories take minutes.
MOST_STORIES = 20

#: A promise, the kind of its violation, and a text.
Violation = tuple[str, str, str]


class Finding(NamedTuple):
    promise: str
    kind: str
    text: str
    #: All recorded facts about the task, ordered by time. Only the first findings have a story.
    story: str = ""

    def __str__(self) -> str:
        return f"{self.promise} {self.kind}: {self.text}\n{self.story}"


class Recovery(NamedTuple):
    """How long due tasks waited because of a fault."""

    fault: Fault
    #: The number of tasks that waited, and the longest wait: since the begin of a kill, and of a
    #: fault with a bound; since the end of another one.
    tasks: int
    seconds: float


@dataclass
class Verdict:
    """What the history of a run, or of several runs, shows."""

    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        self.counts.update(other.counts)  # `+=` would drop what was counted as 0
        self.recoveries += other.recoveries
        self.findings += other.findings

    def kinds(self) -> Counter[str]:
        return Counter(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds().items()))
        return "\n\n".join(
            [f"{counts}: {found or 'nothing found'}", *map(str, self.findings[:MOST_STORIES])]
        )


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
        self._history, self._faults = history, history.faults
        self._max_lost_leases = max_lost_leases
        self._quiet_us, self._by_us = quiet_us, by_us
        self._rules: tuple[Callable[[TaskRecord], Iterator[Violation]], ...] = (
            self._acknowledged_runs,
            self._nothing_else_runs,
            self._never_early,
            self._legal_moves,
            self._one_lease,
            self._extra_runs_are_explained,
            self._bounded,
            self._quiet,
            self._published_in_time,
            self._not_published_after_a_revoke,
            self._published_once,
            self._delivered,
        )

    def verdict(self) -> Verdict:
        history, verdict = self._history, Verdict()
        for id, task in history.tasks.items():
            for promise, kind, text in (found for rule in self._rules for found in rule(task)):
                has_story = len(verdict.findings) < MOST_STORIES
                story = task.story(self._faults) if has_story else ""
                verdict.findings.append(Finding(promise, kind, f"task {id}: {text}", story))
        for schedule in history.recurring:
            verdict.findings += [Finding(*found) for found in _wrong_occurrences(schedule)]
        for process in history.hung:
            verdict.findings.append(Finding("I8", "hung", f"{process} is alive but runs no task"))
        self._add_recoveries(verdict)
        verdict.counts.update(self._counts())
        return verdict

    def _counts(self) -> dict[str, int]:
        tasks = self._history.tasks.values()
        kinds = [fault.kind for fault in self._faults if fault.kind != STALL]
        again = ((t, c) for t in tasks for c in t.claims if c.is_lost and t.has_run(c))
        counts = {
            "tasks": len(tasks),
            "runs": sum(len(task.runs) for task in tasks),
            "duplicates explained": sum(starmap(self._is_explained, again))
            + sum(len(self._forgotten(task)) for task in tasks),
            "messages published": sum(len(task.published_us) for task in tasks),
            "faults": len(kinds),
            "kills": sum(KILL in kind for kind in kinds),
        }
        asked = (f"times {r.call} {r.answer}" for task in tasks for r in task.calls.values())
        return counts | Counter(sorted(asked))

    # -- promises to callers ----------------------------------------------------------------------

    def _acknowledged_runs(self, task: TaskRecord) -> Iterator[Violation]:
        last = task.last
        if not task.answered("schedule", "ok"):
            return
        if last is None:
            yield "I1", "lost", "its schedule was acknowledged, but it has no row"
        elif last.status is Status.CANCELLED:
            cancels = *task.answered("cancel", "ok", "unknown"), *task.answered("revoke", *_MAYBE)
            if not cancels:
                yield "I1", "lost", "it is CANCELLED, but no caller cancelled it"
        elif last.status in FINISHED:
            # Workers may die between claim and run as often as is allowed.
            is_given_up = last.status is Status.FAILED and last.lapses >= self._max_lost_leases
            if not (task.runs or task.published_us or is_given_up):
                yield "I1", "lost", f"it is {last.status.name} but it never ran"
            elif task.published_us and last.status is Status.FAILED and not last.lapses:
                yield "I1", "lost", "its message was given up"

    def _nothing_else_runs(self, task: TaskRecord) -> Iterator[Violation]:
        if not task.answered("schedule", *_MAYBE):
            refused = "its schedule was refused or rolled back"
            if task.runs or task.published_us:
                yield "I2", "unexpected", f"it ran, but {refused}"
            elif task.changes:
                yield "I2", "unexpected", f"{refused}, but it has a row"
        for version in {run.version for run in task.runs.values()}:
            is_known = task.claim_of(version) or version in self._forgotten(task)
            if task.changes and not is_known:
                yield "I4", "unexpected", f"the run of version {version} had no claim"
        again = [record.answered_us for record in task.answered("rerun", *_MAYBE)]
        for cancel in task.answered("cancel", "ok"):
            late = [r for r in task.runs.values() if r.began_us > cancel.answered_us]
            if any(not any(at_us < run.began_us for at_us in again) for run in late):
                yield "I1", "unexpected", "it ran after its cancel was acknowledged"

    def _never_early(self, task: TaskRecord) -> Iterator[Violation]:
        asked = [r for r in task.calls.values() if r.due_us is not None and r.answer != "failed"]
        moves = task.answered("reschedule", "unknown") + task.answered("rerun", "unknown")
        for run in task.runs.values():
            claim = task.claim_of(run.version)
            if claim is not None and run.began_us < claim.change.due_us:
                early_us = claim.change.due_us - run.began_us
                yield "I3", "early", f"version {run.version} began {early_us} us before its time"
                continue
            if any(move.due_us is None and move.asked_us <= run.began_us for move in moves):
                continue  # its due time may have changed, and the new one is unknown
            known = [r for r in asked if r.answer == "ok" and r.answered_us <= run.began_us]
            open_ones = [r for r in asked if r not in known and r.asked_us <= run.began_us]
            dues = [r.due_us for r in (*open_ones, *known[-1:]) if r.due_us]
            if dues and run.began_us < min(dues):
                early_us = min(dues) - run.began_us
                text = f"version {run.version} began {early_us} us before the requested time"
                yield "I3", "early", text

    # -- the row ----------------------------------------------------------------------------------

    def _legal_moves(self, task: TaskRecord) -> Iterator[Violation]:
        for before, change in pairwise([None, *task.changes]):
            assert change is not None
            if change.was is None:
                continue
            was, now = (change.was, change.version_was), (change.status, change.version)
            if before is not None and (before.status, before.version) != was:
                text = f"version {before.version} was not what version {change.version} came from"
                yield "I4", "overwritten", text
            text = f"{change.was} became {change.status}"
            if change.version == change.version_was:
                if was != now:
                    yield "I4", "unfenced", f"{text} under one version"
            elif (change.was, change.status) not in _LEGAL:
                is_second = change.was in FINISHED and change.status in FINISHED
                yield "I4", "double finish" if is_second else "illegal move", text

    def _one_lease(self, task: TaskRecord) -> Iterator[Violation]:
        """Find leases that ended too early.

        A lease may end at its time, with its row's settlement, or with the death of its owner.
        """
        for claim in task.claims:
            end, lease_us = claim.end, claim.renewed.lease_until_us
            if not claim.is_lost or end is None or lease_us is None or end.at_us >= lease_us:
                continue
            hit = [fault for fault in self._hit(claim) if fault.from_us <= claim.held_until_us]
            has_ended = any(fault.effect in ("dead", "ending") for fault in hit)
            away_us = time_away_us(hit, claim.renewed.at_us, claim.held_until_us)
            if not has_ended and away_us < SILENT_US:
                early_us, version = lease_us - end.at_us, claim.change.version
                text = f"version {version} was recovered {early_us} us before its lease ended"
                yield "I5", "two leases", text

    # -- extra runs -------------------------------------------------------------------------------

    def _hit(self, claim: Claim) -> list[Fault]:
        """Return the faults of the owner of a claim."""
        owner = claim.change.worker or ""
        hurt = (fault for fault in self._faults if fault.effect != "none")
        return [fault for fault in hurt if any(part in owner for part in fault.key_owners)]

    def _is_explained(self, task: TaskRecord, claim: Claim) -> bool:
        """Return whether a fault explains that the lease of a claim was lost: the owner was dead,
        or away when the lease had to be renewed.

        A process whose run has ended gives its result up after a lease without the database.
        Afterwards an older chunk of the worker may keep the row for longer (record 0006).
        """
        if claim.end is None:
            return False
        until_us, begun_us = claim.held_until_us, claim.change.at_us
        hit = [fault for fault in self._hit(claim) if fault.from_us <= until_us]
        away_us = time_away_us(hit, claim.renewed.at_us, until_us)
        is_dead = any(fault.effect == "dead" for fault in hit)
        runs = (run for run in task.runs.values() if run.version == claim.change.version)
        lease_us = (claim.change.lease_until_us or begun_us) - begun_us
        is_given_up = any(
            time_away_us(hit, run.ended_us, until_us) >= lease_us for run in runs if run.ended_us
        )
        is_missed = 0 < away_us >= MISSED * (until_us - claim.renewed.at_us)
        return is_dead or is_missed or is_given_up

    def _forgotten(self, task: TaskRecord) -> set[int]:
        """Return the versions of the runs whose claims a crash of the database has lost.

        On PostgreSQL the version of a claim is its time.
        """
        versions = {run.version for run in task.runs.values() if not task.claim_of(run.version)}
        return {v for v in versions if any(fault.may_lose_claim(v) for fault in self._faults)}

    def _extra_runs_are_explained(self, task: TaskRecord) -> Iterator[Violation]:
        for version, count in Counter(run.version for run in task.runs.values()).items():
            if count > 1:
                yield "I6", "duplicated", f"version {version} ran {count} times"
        for claim in filter(task.has_run, task.claims):
            change, end = claim.change, claim.end
            if end is None or self._is_explained(task, claim):
                continue
            if claim.is_lost:
                text = f"version {change.version} of {change.worker} ran and lost its lease, "
                yield "I6", "duplicated", f"{text}but no fault of its owner explains that"
            elif end.was is Status.RUNNING and end.runs < change.runs and end.worker is None:
                text = f"version {change.version} ran, but was given back as not run"
                yield "I6", "duplicated", text

    def _bounded(self, task: TaskRecord) -> Iterator[Violation]:
        most = max((change.lapses for change in task.changes), default=0)
        lapses_in_a_row = 0
        for claim in task.claims:
            lapsed = claim.end is None or claim.is_lost or claim.end.status is Status.RUNNING
            lapses_in_a_row = lapses_in_a_row + 1 if lapsed else 0
            most = max(most, lapses_in_a_row)
        if most > self._max_lost_leases:
            yield "I7", "too often", f"it lost its lease {most} times in a row"
        allowed = MOST_RUNS.get(task.last.tag, 1) if task.last else 1
        lost = {claim.change.version for claim in task.claims if claim.is_lost}
        settled = {run.version for run in task.runs.values()} - lost - self._forgotten(task)
        if len(settled) > allowed * (1 + len(task.answered("rerun", *_MAYBE))):
            text = f"it ran {len(settled)} times to its end, but may run {allowed}"
            yield "I7", "too often", text

    # -- time -------------------------------------------------------------------------------------

    def _quiet(self, task: TaskRecord) -> Iterator[Violation]:
        last, quiet_us = task.last, self._quiet_us
        if quiet_us is None or last is None:
            return
        if last.status is Status.RUNNING and (last.lease_until_us or 0) < quiet_us:
            yield "I8", "stuck", "it is RUNNING, but its lease is over"
        elif last.status is Status.NOT_COMPLETE and last.due_us < quiet_us:
            yield "I8", "stuck", "it is overdue"
        elif (by_us := self._by_us) and (then := task.at(by_us)):
            if then.status not in LIVE or then.due_us > by_us - WHILE_US:
                return
            text = f"it was due for {(by_us - then.due_us) / 1e6:.1f} s at the deadline"
            ends = (c for c in task.changes if c.at_us > by_us and c.status in FINISHED)
            if (end := next(ends, None)) is None:
                yield "I8", "stuck", f"{text}, and is not finished"
            else:
                late_s = (end.at_us - by_us) / 1e6
                yield "I8", "late", f"{text}, and was finished {late_s:.1f} s later"

    def _add_recoveries(self, verdict: Verdict) -> None:
        """Attribute the waits of due tasks to faults, and compare them with the bounds."""
        late = Counter[int]()
        # By the number of a fault: how far beyond its bound, seconds, bound, and task.
        worst: dict[int, tuple[float, float, float, int]] = {}
        for id, task in self._history.tasks.items():
            for since_us, until_us, lapses in _waits(task):
                if until_us - since_us <= LATE_US or not self._faults:
                    continue
                number = _to_blame(self._faults, since_us, until_us)
                fault = self._faults[number]
                is_from_begin = fault.bounds_s is not None or fault.effect == "dead"
                over_us = fault.from_us if is_from_begin else fault.until_us
                seconds = max(until_us - max(since_us, over_us), 0) / 1e6
                bound_s = fault.bounds_s[lapses > 0] if fault.bounds_s else 0.0
                found = (seconds - bound_s, seconds, bound_s, id)
                late[number] += seconds * 1e6 > LATE_US
                worst[number] = max(worst.get(number, found), found)
        for number, fault in enumerate(self._faults):
            beyond_s, seconds, bound_s, id = worst.get(number, (0.0, 0.0, 0.0, 0))
            verdict.recoveries.append(Recovery(fault, late[number], seconds))
            if fault.bounds_s is not None and beyond_s > 0:
                text = f"it waited {seconds:.2f} s after {fault.kind}, whose bound is {bound_s:g} s"
                story = self._history.tasks[id].story(self._faults)
                verdict.findings.append(Finding("I8", "late", f"task {id}: {text}", story))

    # -- the messages of Celery tasks -------------------------------------------------------------

    def _published_in_time(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that were published early, without a claim, or after the row's end."""
        for at_us in task.published_us:
            claim = task.claim_before(at_us)
            if claim is None:
                if not self._is_publication_of_a_lost_claim(task, at_us):
                    yield "I4", "unexpected", "its message was published without a claim"
            elif at_us < claim.change.due_us:
                early_us = claim.change.due_us - at_us
                yield "I3", "early", f"its message was published {early_us} us before its time"
        dues = [record.due_us for record in task.answered("schedule", "ok") if record.due_us]
        if dues and min(task.published_us, default=min(dues)) < min(dues):
            text = "its message was published before the time that the caller asked for"
            yield "I3", "early", text

    def _not_published_after_a_revoke(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages whose row was claimed after the revoke was acknowledged."""
        revoked_us = [call.answered_us for call in task.answered("revoke", "ok")]
        claims = [claim for at_us in task.published_us if (claim := task.claim_before(at_us))]
        if revoked_us and any(claim.change.at_us > min(revoked_us) for claim in claims):
            yield "I1", "revoked", "it was published after its revoke was acknowledged"

    def _published_once(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that were published again although no fault explains that."""
        counts = Counter[int]()
        for at_us in task.published_us:
            claim = task.claim_before(at_us)
            if claim is not None and not self._is_publication_of_a_lost_claim(task, at_us):
                counts[claim.change.version] += 1
        counts[max(counts, default=0)] -= 1  # one publication is right
        for claim in task.claims:
            if counts[claim.change.version] > 0 and not self._is_explained(task, claim):
                # A fault may have kept the broker from confirming the message.
                from_us = claim.change.at_us
                until_us = claim.end.at_us if claim.end else from_us + AFTERMATH_US
                if not self._is_disturbed(self._faults, from_us, until_us):
                    version = claim.change.version
                    text = f"version {version} published its message, which was published again"
                    yield "I6", "duplicated", text

    def _delivered(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that the broker confirmed, but whose Celery task never began."""
        is_done = task.last is not None and task.last.status is Status.DONE
        if not is_done or not task.published_us or task.begun_us:
            return
        at_us = max(task.published_us)
        lossy = [fault for fault in self._faults if fault.loses_messages]
        is_lost = self._is_disturbed(lossy, at_us, at_us + IN_BROKER_US)
        if not is_lost and not task.answered("revoke", *_MAYBE):
            yield "I1", "lost", "its message was published, but its task never began"

    def _is_publication_of_a_lost_claim(self, task: TaskRecord, at_us: int) -> bool:
        """Return whether a crash of the database may have lost the claim of a publication.

        While a recorded claim lasts, the publication belongs to it.
        """
        claim = task.claim_before(at_us)
        if claim is not None and (claim.end is None or claim.end.at_us > at_us):
            return False
        return any(fault.may_lose_claim(at_us, AFTERMATH_US) for fault in self._faults)

    @staticmethod
    def _is_disturbed(faults: Iterable[Fault], from_us: int, until_us: int) -> bool:
        """Return whether a fault or its aftermath is in this period."""
        return any(f.from_us <= until_us and f.until_us + AFTERMATH_US >= from_us for f in faults)


def time_away_us(faults: Iterable[Fault], since_us: int, until_us: int) -> int:
    """Return how long faults kept an owner away. Overlapping faults count once."""
    total, known_us = 0, since_us
    for fault in sorted((f for f in faults if f.effect == "away"), key=lambda f: f.from_us):
        ended_us = min(fault.until_us, until_us)
        total += max(ended_us - max(fault.from_us, known_us), 0)
        known_us = max(known_us, ended_us)
    return total


def _waits(task: TaskRecord) -> Iterator[tuple[int, int, int]]:
    """Yield from when until when the due task waited for a claim, or for the end of the row after
    its run, and the lapses of the row.
    """
    ended_us = {run.version: run.ended_us or 0 for run in task.runs.values()}
    due_us, since_us = -1, 0
    for change in task.changes:
        if change.due_us != due_us:
            due_us, since_us = change.due_us, max(change.due_us, change.at_us)
        if change.status is Status.RUNNING and change.version != change.version_was:
            yield since_us, change.at_us, change.lapses
        elif change.status in (Status.DONE, Status.FAILED):
            of_run_us = ended_us.get(change.version_was or 0, 0)
            yield max(since_us, of_run_us), change.at_us, change.lapses


def _to_blame(faults: list[Fault], since_us: int, until_us: int) -> int:
    """Return the number of the fault that overlaps a wait most, else of the last one before it."""

    def overlap(number: int) -> tuple[bool, int, int]:
        fault = faults[number]
        common_us = min(fault.until_us, until_us) - max(fault.from_us, since_us)
        return fault.from_us <= until_us, common_us, fault.from_us

    return max(range(len(faults)), key=overlap)


# -- recurring schedules: each occurrence has one task, unless the policy leaves it out ------------


def _wrong_occurrences(some: Recurs) -> Iterator[Violation]:
    """Find occurrences without a task, with several, or at a wrong time, and tasks that overlap."""
    times = Counter(each.at_us for each in some.found)
    name = f"schedule {some.name!r}"
    for at_us, count in sorted(times.items()):
        if count > 1:
            yield "I9", "repeated", f"{name}: {count} tasks for {at_us}"
        if at_us < some.first_us or (at_us - some.first_us) % some.interval_us:
            yield "I9", "unexpected", f"{name}: no occurrence is at {at_us}"
    for at_us in range(some.first_us, some.last_us + 1, some.interval_us):
        if at_us not in times and not _may_be_left_out(some, at_us):
            yield "I9", "left out", f"{name}: no task for {at_us}"
    if some.overlap == "skip":
        for before, after in pairwise(sorted(some.found, key=lambda each: each.made_us)):
            if before.ended_us is None or before.ended_us > after.made_us:
                text = f"{after.at_us} was made while {before.at_us} waited"
                yield "I9", "overlapped", f"{name}: {text}"


def _may_be_left_out(some: Recurs, at_us: int) -> bool:
    before = [each for each in some.found if each.at_us < at_us]
    after = next((each for each in some.found if each.at_us > at_us), None)
    if some.overlap == "skip" and before:
        ended_us = before[-1].ended_us
        if ended_us is None or ended_us >= at_us:
            return True
    # After an outage, the last occurrence that has passed gets its task, and the earlier ones none.
    return some.missed == "latest" and after is not None and after.at_us <= after.made_us
