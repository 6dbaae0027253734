"""The checker of histories finds what breaks a promise, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, Literal

import pytest

from chaos import history as records
from chaos.checker import Checker, Verdict
from chaos.failpoints import FAILPOINTS
from chaos.history import (
    ALL,
    CallRecord,
    Fault,
    History,
    MessageRecord,
    Occurrence,
    RowChange,
    RunRecord,
)
from delaytasks import Status

NOW = 1_700_000_000_000_000
S = 1_000_000
WAITS, RUNS, DONE = Status.NOT_COMPLETE, Status.RUNNING, Status.DONE
CANCELLED, FAILED = Status.CANCELLED, Status.FAILED
#: A run without a claim is counted as a run that the schedule does not allow, too.
WITHOUT_CLAIM = {"unexpected", "too often"}


def us(second: float) -> int:
    return int(NOW + second * S)


def verdict_of(
    noted: Iterable[Any], faults: Iterable[Fault] = (), by_s: float | None = None, quiet_s: int = 60
) -> Verdict:
    history = History(faults=list(faults))
    for one in noted:
        history.note(one)
    by_us = None if by_s is None else us(by_s)
    return Checker(history, quiet_us=us(quiet_s), by_us=by_us).verdict()


def found(noted: Iterable[Any], faults: Iterable[Fault] = (), **times: Any) -> set[str]:
    return set(verdict_of(noted, faults, **times).kinds())


def calls(*answers: records.Answer) -> list[CallRecord]:
    """One task that is scheduled several times with its id, due immediately."""
    times = [(answer, us(n)) for n, answer in enumerate(answers)]
    return [CallRecord(1, "schedule", answer, at, at + S // 2, at) for answer, at in times]


def asked(
    answer: records.Answer, from_s: float, until_s: float, due_s: float | None, call: Any = None
) -> CallRecord:
    due_us = None if due_s is None else us(due_s)
    return CallRecord(1, call or "schedule", answer, us(from_s), us(until_s), due_us)


def row(*statuses: tuple[float, Status], due: float = 2, lapses: int = 0) -> list[RowChange]:
    """A row with these statuses from these seconds on."""
    made: list[RowChange] = []
    for version, (second, status) in enumerate(statuses):
        was = statuses[version - 1][1] if version else None
        at_us, old = us(second), version - 1 if version else None
        lease = (at_us + 60 * S, "w") if status is RUNS else (None, None)
        counts = 0, lapses if version > 1 else 0
        made.append(RowChange(1, at_us, was, status, old, version, *counts, us(due), *lease))
    return made


def ran_at(second: float) -> list[RowChange | RunRecord]:
    """A row that is inserted, runs and ends."""
    changes = row((second, WAITS), (second + 0.001, RUNS), (second + 0.002, DONE), due=second)
    return [*changes, RunRecord(1, 1, "w", us(second + 0.0015), us(second + 0.0018))]


# -- answers, due times and moves -----------------------------------------------------------------


def after_done(to: Status, was: Status = DONE, version: int = 3) -> RowChange:
    """A change of a row that `ran_at` has ended with version 2, and that is due later then."""
    return RowChange(1, us(5), was, to, 2, version, 0, 0, us(70), None, None)


def given_up(lapses: int) -> RowChange:
    return RowChange(1, NOW, RUNS, FAILED, 9, 10, 5, lapses, NOW, None, None)


#: What happened to a task, and what the checker finds.
TASKS: dict[str, tuple[list[Any], set[str]]] = {
    "with an unknown answer may run": ([*calls("unknown"), *ran_at(3)], set()),
    "with an unknown answer may be missing": (calls("unknown"), set()),
    "that was refused may be missing": (calls("failed"), set()),
    "that was confirmed later is lost": (calls("unknown", "ok"), {"lost"}),
    "with an unknown answer ran early": ([asked("unknown", -5, -4, 0), *ran_at(-3)], {"early"}),
    # A producer that is killed during `reschedule` does not know the new due time.
    "with an unknown due time is not early":
        ([asked("ok", -9, -8, 9), asked("unknown", -7, 0, None, "reschedule"), *ran_at(0)], set()),
    "whose workers died too rarely is lost":
        ([*calls("ok"), given_up(4)], {"lost"}),
    "whose workers died as often as allowed is not lost":
        ([*calls("ok"), given_up(5)], set()),
    "that was done is done again":
        ([*calls("ok"), *ran_at(3), after_done(DONE)], {"double finish"}),
    "that was done is changed by another program":
        ([*calls("ok"), *ran_at(3), after_done(WAITS, version=2)], {"unfenced"}),
    "whose changes are no chain":
        ([*calls("ok"), *ran_at(3), after_done(FAILED, was=RUNS, version=9)], {"overwritten"}),
}  # fmt: skip


@pytest.mark.parametrize("what", TASKS)
def test_the_checker_judges_a_task(what: str) -> None:
    noted, kinds = TASKS[what]
    assert found(noted) == kinds


# -- faults that explain repeated runs ------------------------------------------------------------


def lapsed(
    renewals: Sequence[float] = (),
    end: float = 6,
    lease_s: int = 4,
    is_over: bool = True,
    ran_until: float | None = None,
) -> list[Any]:
    """A task that ran twice.

    A process of w1 had the first claim for a lease, and renewed it at these times.
    """
    first, second = "w1@x/11-aa", "w2@x/22-bb"
    changes = [RowChange(1, NOW, None, WAITS, None, 0, 0, 0, NOW, None, None)]
    for was, version, at in [(WAITS, 0, us(1)), *((RUNS, 1, us(at)) for at in renewals)]:
        changes.append(RowChange(1, at, was, RUNS, version, 1, 1, 0, NOW, at + lease_s * S, first))
    changes += [
        RowChange(1, us(end), RUNS, WAITS, 1, 2, 1, 1, NOW, None, None),
        RowChange(1, us(27), WAITS, RUNS, 2, 3, 2, 1, NOW, us(31), second),
    ]
    if is_over:
        changes.append(RowChange(1, us(28), RUNS, DONE, 3, 4, 2, 0, NOW, None, second))
    first_end = None if ran_until is None else us(ran_until)
    runs = [RunRecord(1, 1, "11", us(1), first_end), RunRecord(1, 3, "22", us(27), us(28))]
    return [*calls("ok"), *changes, *runs]


def fault(
    effect: records.Effect, *owners: str, since_s: float = 2, until_s: float = 5, **more: Any
) -> Fault:
    return Fault("as asked", "x", us(since_s), us(until_s), effect, owners, **more)


OTHERS = [fault("dead", "w2@x/"), fault("away", "w2@x/"), fault("dead", "w1@x/1-")]


def away(*spans: tuple[float, float]) -> list[Fault]:
    return [fault("away", *ALL, since_s=since, until_s=until) for since, until in spans]


TWICE_RUN = {"duplicated"}
RENEWED: dict[str, Any] = {"renewals": (3, 20), "end": 25}
EARLY: dict[str, Any] = {"end": 3}
LONG: dict[str, Any] = {"end": 12, "lease_s": 20}
#: The faults of the first claim, what else is different, and what the checker finds.
SECOND_RUNS: dict[str, tuple[list[Fault], dict[str, Any], set[str]]] = {
    "of a dead worker": ([fault("dead", "w1@x/")], {}, set()),
    "of a dead process": ([fault("dead", "w1@x/11-")], {}, set()),
    "of a worker without its database": ([fault("away", "w1@x/")], {}, set()),
    "after faults of others": (OTHERS, {}, TWICE_RUN),
    "after a fault of a beat or the broker": ([fault("none")], {}, TWICE_RUN),
    "of a worker that ends in order": ([fault("ending", "w1@x/")], {}, TWICE_RUN),
    "after a kill when the lease was over": ([fault("dead", "w1@x/", since_s=5.5)], {}, TWICE_RUN),
    "of a process whose claim a slow network delivered after its kill":
        ([fault("dead", "w1@x/", since_s=0.1, until_s=0.2)], {}, set()),
    "after a fault before the last renewal": (away((4, 19)), RENEWED, TWICE_RUN),
    "whose result waited for a lease": (away((4, 8)), {**RENEWED, "ran_until": 4}, set()),
    "whose result waited for less": (away((4, 8)), {**RENEWED, "ran_until": 4.1}, TWICE_RUN),
    # A fault explains it from a third of a lease of 4 s on.
    "after a short absence": (away((2, 3)), {}, TWICE_RUN),
    "after absences that are long together": (away((2, 3), (3.5, 4)), {}, set()),
    "after absences beyond the lease": (away((0, 1.5), (4.5, 9)), {}, TWICE_RUN),
    # These leases were lost before their end.
    "of a dead worker, early": ([fault("dead", "w1@x/")], EARLY, set()),
    "of a worker without its database, early": (away((1, 5)), EARLY, {"two leases"}),
    "of a worker that ends in order, early": ([fault("ending", "w1@x/")], EARLY, TWICE_RUN),
    "of a worker that was silent for 8 s": (away((1.5, 9.5)), LONG, {"two leases"}),
    "of a worker that was silent for 10 s": (away((1.5, 11.5)), LONG, set()),
}  # fmt: skip


@pytest.mark.parametrize("what", SECOND_RUNS)
def test_the_checker_judges_a_second_run(what: str) -> None:
    faults, changes, kinds = SECOND_RUNS[what]
    verdict = verdict_of(lapsed(**changes), faults)
    assert set(verdict.kinds()) == kinds
    assert kinds or verdict.counts["duplicates explained"] == 1


def test_only_a_crash_explains_a_run_claimed_just_before_it() -> None:
    """The database knows nothing of the first of two claims."""
    for claim_s, is_lossy, kinds in (
        (1.2, True, set()), (4.9, True, set()), (0.9, True, WITHOUT_CLAIM),
        (5.1, True, WITHOUT_CLAIM), (4.9, False, WITHOUT_CLAIM),
    ):  # fmt: skip
        first = RunRecord(1, us(claim_s), "11", us(10))
        crash = fault("away", *ALL, loses_claims=is_lossy)
        assert found([*calls("ok"), first, *ran_at(10)], [crash]) == kinds


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_s", "kinds"), [(9, set()), (15, {"late"}), (26, {"late"}), (29, set())]
)
def test_a_task_finished_after_the_deadline_is_late(by_s: int, kinds: set[str]) -> None:
    assert found(lapsed(), [fault("dead", "w1@x/")], by_s=by_s) == kinds


@pytest.mark.parametrize("quiet_s", [30, 60])
def test_a_task_that_never_ends_is_reported_once_as_stuck(quiet_s: int) -> None:
    """Its lease is still valid, or is over."""
    noted, faults = lapsed(is_over=False), [fault("dead", "w1@x/")]
    assert verdict_of(noted, faults, by_s=29, quiet_s=quiet_s).kinds() == {"stuck": 1}


@pytest.mark.parametrize(
    ("bounds_s", "kinds"), [(None, set()), ((1, 26), set()), ((99, 24), {"late"})]
)
def test_tasks_run_within_the_bounds_of_a_fault(bounds_s: Any, kinds: set[str]) -> None:
    """The task runs 25 s after its worker was killed, and has lost a lease."""
    verdict = verdict_of(lapsed(), [fault("dead", "w1@x/", bounds_s=bounds_s)])
    assert set(verdict.kinds()) == kinds
    [recovery] = verdict.recoveries
    assert recovery.seconds == 25


# -- durable Celery tasks -------------------------------------------------------------------------

#: The statuses of a row that is published as it should be, twice, or after its first message.
PUBLISHED = ((0, WAITS), (2, RUNS), (3, DONE))
TWICE = ((0, WAITS), (2, RUNS), (3, WAITS), (4, RUNS), (5, DONE))
LATE = ((0, WAITS), (5, RUNS), (6, DONE))
LOST, TWICE_PUBLISHED = {"lost"}, (2.5, 4.5)


def found_of_messages(
    changes: list[RowChange],
    published: tuple[float, ...] = (2.5,),
    begun: tuple[float, ...] = (2.7,),
    revoked: Any = None,
    faults: tuple[Fault, ...] = (),
) -> set[str]:
    """`revoked` is the answer of a call that revokes the task after a second."""
    calls = [asked("ok", 0, 0.001, 2)]
    calls += [asked(revoked, 1, 1.001, None, "revoke")] if revoked else []
    messages = [MessageRecord(1, "published", us(s)) for s in published]
    messages += [MessageRecord(1, "begun", us(s)) for s in begun]
    return found([*calls, *changes, *messages], faults)


def message_fault(second: float, **effects: Any) -> Fault:
    return fault("none", since_s=second, until_s=second + 1, **effects)


#: The statuses of a row, what happened to its message, and what the checker finds.
MESSAGES: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "is published once and in time": (PUBLISHED, {}, set()),
    "of a row that was given up is lost": (((0, WAITS), (2, RUNS), (3, FAILED)), {}, LOST),
    "is published after a revoke of which nobody knows":
        (((0, WAITS), (3, RUNS), (4, DONE)), {"published": (3.5,), "revoked": "unknown"}, set()),
    "of a row that its revoke cancels is not published":
        (((0, WAITS), (1.0005, CANCELLED)), {"published": (), "begun": (), "revoked": "ok"}, set()),
    "is published again because of a fault":
        (TWICE, {"published": TWICE_PUBLISHED, "faults": (message_fault(2.5),)}, set()),
    "is published again within one claim": (PUBLISHED, {"published": (2.4, 2.5)}, {"duplicated"}),
    "has a claim that a crash of the database lost":
        (LATE, {"published": (2.5, 5.5), "faults": (message_fault(3, loses_claims=True),)}, set()),
    "does not reach its task": (PUBLISHED, {"begun": ()}, LOST),
    "does not reach its task because of a fault that loses some":
        (PUBLISHED, {"begun": (), "faults": (message_fault(2.5, loses_messages=True),)}, set()),
}  # fmt: skip


@pytest.mark.parametrize("what", MESSAGES)
def test_the_checker_judges_a_message_that(what: str) -> None:
    statuses, happened, kinds = MESSAGES[what]
    assert found_of_messages(row(*statuses), **happened) == kinds


# -- recurring schedules --------------------------------------------------------------------------

Seconds = tuple[float, float, float]


def found_of_schedules(
    *occurrences: Seconds,
    missed: Literal["all", "latest"] = "all",
    overlap: Literal["allow", "skip"] = "allow",
) -> set[str]:
    """A schedule of five occurrences, one in each second. Each has the seconds of its time, of
    its row, and of the end of the row.
    """
    found = [Occurrence(*map(us, each)) for each in occurrences]
    some = records.Recurs("report", S, us(1), us(5), missed, overlap, found=found)
    return set(Checker(History(recurring=[some])).verdict().kinds())


def ahead(*seconds: float) -> list[Seconds]:
    """Occurrences whose tasks were made ten seconds before, and ended a moment after."""
    return [(s, s - 10, s + 0.001) for s in seconds]


MADE: list[Any] = [([1, 2, 3, 4, 5], set()), ([1, 2, 3, 4, 5, 6], set())]
MADE += [([1, 2, 2, 3, 4, 5], {"repeated"}), ([1, 2, 3, 3.5, 4, 5], {"unexpected"})]
MADE += [(some, {"left out"}) for some in ([1, 2, 4, 5], [2, 3, 4, 5], [1, 2, 3, 4], [])]


@pytest.mark.parametrize(("seconds", "kinds"), MADE)
def test_each_occurrence_has_exactly_one_task(seconds: Any, kinds: set[str]) -> None:
    for missed in ("all", "latest"):
        assert found_of_schedules(*ahead(*seconds), missed=missed) == kinds


#: No sweep takes place from the second occurrence until after the fourth one. The fifth one gets
#: its task before its time.
OUTAGE = [*ahead(1), (4, 4.5, 4.5), *ahead(5)]
#: The third occurrence has no task. The task before it runs then, or has ended.
BUSY: list[Seconds] = [(1, 0, 1.5), (2, 1.6, 3.7), (4, 3.8, 4.5), (5, 4.6, 5.1)]
FREE: list[Seconds] = [(1, 0, 1.5), (2, 1.6, 2.2), (4, 2.3, 4.5), (5, 4.6, 5.1)]
OVERLAPPING = [(1, 0, 1.5), (2, 1.4, 2.2), (3, 2.3, 3.1), *BUSY[2:]]
POLICIES: list[Any] = [
    (OUTAGE, "all", "allow", {"left out"}),
    (OUTAGE, "latest", "allow", set()),
    (BUSY, "latest", "skip", set()),
    (FREE, "latest", "skip", {"left out"}),
    (OVERLAPPING, "latest", "skip", {"overlapped"}),
]


@pytest.mark.parametrize(("occurrences", "missed", "overlap", "kinds"), POLICIES)
def test_the_policy_decides_which_occurrences_have_no_task(
    occurrences: list[Seconds], missed: Any, overlap: Any, kinds: set[str]
) -> None:
    assert found_of_schedules(*occurrences, missed=missed, overlap=overlap) == kinds


@pytest.mark.parametrize("failpoint", FAILPOINTS.values(), ids=lambda failpoint: failpoint.name)
def test_each_failpoint_is_at_a_method_that_exists(failpoint: Any) -> None:
    for path in failpoint.methods:
        assert callable(resolve_name(f"delaytasks.{path}"))
