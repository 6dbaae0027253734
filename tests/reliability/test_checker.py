"""The checker of histories finds what breaks a promise, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, Literal

import pytest

from chaos import history as records
from chaos.checker import _LEGAL, Checker
from chaos.claims_ahead import claimed_ahead
from chaos.failpoints.catalogue import FAILPOINTS, Failpoint
from chaos.history import ALL, CallRecord, Fault, History, Occurrence, RowChange, RunRecord
from delaytasks import Status

# The checker's treatment of unknown answers, and of faults that explain repeated runs


NOW = 1_700_000_000_000_000
S = 1_000_000
#: A run without a claim is counted as a run that the schedule does not allow, too.
WITHOUT_CLAIM = {"unexpected", "too often"}


def calls(*answers: records.Answer) -> list[CallRecord]:
    """One task that is scheduled several times with its id, due immediately."""
    times = [(answer, NOW + n * S) for n, answer in enumerate(answers)]
    return [CallRecord(1, "schedule", answer, at, at + S // 2, at) for answer, at in times]


def row_and_run(at_us: int) -> tuple[list[RowChange], list[RunRecord]]:
    """A row that is inserted, runs and ends."""
    waits, runs = Status.NOT_COMPLETE, Status.RUNNING
    moves = [(None, waits), (waits, runs), (runs, Status.DONE)]
    before = [None, 0, 1]
    changes = [
        RowChange(1, at_us + n * 1000, was, to, before[n], n, min(n, 1), 0, at_us, None, None)
        for n, (was, to) in enumerate(moves)
    ]
    return changes, [RunRecord(1, 1, "w", at_us + 1500, at_us + 1800)]


def found(history: History) -> set[str]:
    return set(Checker(history, quiet_us=NOW + 60 * S).verdict().counts())


@pytest.mark.parametrize(
    "answers", [("unknown",), ("unknown", "unknown"), ("unknown", "failed"), ("unknown", "ok")]
)
def test_a_task_with_an_unknown_answer_may_run(answers: tuple[records.Answer, ...]) -> None:
    changes, ran = row_and_run(NOW + 3 * S)
    assert found(History(calls(*answers), ran, changes)) == set()


ANSWERS: list[Any] = [(("unknown",), set()), (("failed",), set()), (("unknown", "failed"), set())]
ANSWERS += [(("unknown", "ok"), {"lost"})]


@pytest.mark.parametrize(("answers", "kinds"), ANSWERS)
def test_an_unknown_answer_may_miss_its_task_unless_confirmed(answers: Any, kinds: Any) -> None:
    assert found(History(calls(*answers))) == kinds


def test_a_refused_task_must_not_run() -> None:
    changes, ran = row_and_run(NOW + 3 * S)
    assert found(History(calls("failed", "failed"), ran, changes)) == {"unexpected"}


def test_a_run_is_not_early_if_the_due_time_is_unknown() -> None:
    """A producer that is killed during `reschedule` does not know the new due time."""
    changes, ran = row_and_run(NOW)
    asked = [CallRecord(1, "schedule", "ok", NOW - 9 * S, NOW - 8 * S, NOW + 9 * S)]
    assert found(History(asked, ran, changes)) == {"early"}
    asked.append(CallRecord(1, "reschedule", "unknown", NOW - 7 * S, NOW))
    assert found(History(asked, ran, changes)) == set()


def test_a_task_with_an_unknown_answer_must_not_run_early() -> None:
    changes, ran = row_and_run(NOW - 3 * S)
    asked = [CallRecord(1, "schedule", "unknown", NOW - 5 * S, NOW - 4 * S, NOW)]
    assert found(History(asked, ran, changes)) == {"early"}


def lapsed(renewals: Sequence[int] = (), end_us: int = NOW + 6 * S, lease_s: int = 4) -> History:
    """A task that ran twice.

    A process of w1 had the first claim for a lease, and renewed it at these times.
    """
    waits, runs, first, second = Status.NOT_COMPLETE, Status.RUNNING, "w1@x/11-aa", "w2@x/22-bb"
    changes = [RowChange(1, NOW, None, waits, None, 0, 0, 0, NOW, None, None)]
    for was, version, at in [(waits, 0, NOW + S), *((runs, 1, at_us) for at_us in renewals)]:
        changes.append(RowChange(1, at, was, runs, version, 1, 1, 0, NOW, at + lease_s * S, first))
    changes += [
        RowChange(1, end_us, runs, waits, 1, 2, 1, 1, NOW, None, None),
        RowChange(1, NOW + 27 * S, waits, runs, 2, 3, 2, 1, NOW, NOW + 31 * S, second),
        RowChange(1, NOW + 28 * S, runs, Status.DONE, 3, 4, 2, 0, NOW, None, second),
    ]
    ran = [RunRecord(1, 1, "11", NOW + S), RunRecord(1, 3, "22", NOW + 27 * S, NOW + 28 * S)]
    return History(calls("ok"), ran, changes)


def fault(
    effect: records.Effect, *owners: str, since_s: float = 2, until_s: float = 5, **more: bool
) -> Fault:
    times = NOW + int(since_s * S), NOW + int(until_s * S)
    return Fault("as asked", "x", *times, effect, owners, **more)


OTHER_WORKERS = [fault("dead", "w2@x/"), fault("away", "w2@x/"), fault("dead", "w11@x/")]
OTHER_PROCESSES = [fault("dead", "w1@x/12-"), fault("dead", "w1@x/1-")]


def away(*spans: tuple[float, float]) -> list[Fault]:
    return [fault("away", *ALL, since_s=since, until_s=until) for since, until in spans]


TWICE_RUN = {"duplicated"}
RENEWED: dict[str, Any] = {"renewals": (NOW + 3 * S, NOW + 20 * S), "end_us": NOW + 25 * S}
EARLY: dict[str, Any] = {"end_us": NOW + 3 * S}
LONG: dict[str, Any] = {"end_us": NOW + 12 * S, "lease_s": 20}
#: The faults of the first claim, what else is different, and what the checker finds.
SECOND_RUNS: dict[str, tuple[list[Fault], dict[str, Any], set[str]]] = {
    "of a dead worker": ([fault("dead", "w1@x/")], {}, set()),
    "of a dead process": ([fault("dead", "w1@x/11-")], {}, set()),
    "of a worker without its database": ([fault("away", "w1@x/")], {}, set()),
    "of a database that was away": ([fault("away", *ALL)], {}, set()),
    "without a fault": ([], {}, TWICE_RUN),
    "after faults of other workers": (OTHER_WORKERS, {}, TWICE_RUN),
    "after faults of other processes": (OTHER_PROCESSES, {}, TWICE_RUN),
    "after a fault of a beat or the broker": ([fault("none")], {}, TWICE_RUN),
    "after a fault of the proxy of producers": ([fault("away")], {}, TWICE_RUN),
    "of a worker that ends in order": ([fault("ending", "w1@x/")], {}, TWICE_RUN),
    "after a kill when the lease was over": ([fault("dead", "w1@x/", since_s=5.5)], {}, TWICE_RUN),
    "of a process whose claim a slow network delivered after its kill":
        ([fault("dead", "w1@x/", since_s=0.1, until_s=0.2)], {}, set()),
    "after a fault before the last renewal": (away((4, 19)), RENEWED, TWICE_RUN),
    # A fault explains it from a third of a lease of 4 s on.
    "after a short absence": (away((2, 3)), {}, TWICE_RUN),
    "after short absences at the same time": (away((2, 3), (2.2, 3.2)), {}, TWICE_RUN),
    "after absences that are long together": (away((2, 3), (3.5, 4)), {}, set()),
    "after absences beyond the lease": (away((0, 1.5), (4.5, 9)), {}, TWICE_RUN),
    "after an absence that began before": (away((0, 2.5)), {}, set()),
    # These leases were lost before their end.
    "of a dead worker, early": ([fault("dead", "w1@x/")], EARLY, set()),
    "of a living worker, early": ([fault("dead", "w2@x/")], EARLY, {"two leases", "duplicated"}),
    "of a worker without its database, early": (away((1, 5)), EARLY, {"two leases"}),
    "of a worker that ends in order, early": ([fault("ending", "w1@x/")], EARLY, TWICE_RUN),
    "of a worker that was silent for 8 s": (away((1.5, 9.5)), LONG, {"two leases"}),
    "of a worker that was silent for 10 s": (away((1.5, 11.5)), LONG, set()),
}  # fmt: skip


@pytest.mark.parametrize("what", SECOND_RUNS)
def test_the_checker_judges_a_second_run(what: str) -> None:
    faults, changes, kinds = SECOND_RUNS[what]
    history = lapsed(**changes)
    history.faults = faults
    verdict = Checker(history, quiet_us=NOW + 60 * S).verdict()
    assert set(verdict.counts()) == kinds
    assert kinds or verdict.explained == 1


def forgotten(claim_s: float) -> History:
    """A task that ran twice, of whose first claim the database knows nothing."""
    changes, ran = row_and_run(NOW + 10 * S)
    first = RunRecord(1, NOW + int(claim_s * S), "11", NOW + 10 * S)
    return History(calls("ok"), [first, *ran], changes)


@pytest.mark.parametrize(
    ("claim_s", "kinds"), [(1.2, set()), (4.9, set()), (0.9, WITHOUT_CLAIM), (5.1, WITHOUT_CLAIM)]
)
def test_a_crash_explains_a_run_claimed_just_before_it(claim_s: float, kinds: set[str]) -> None:
    history = forgotten(claim_s)
    history.faults = [fault("away", *ALL, loses_claims=True)]
    verdict = Checker(history).verdict()
    assert set(verdict.counts()) == kinds
    assert verdict.explained == (0 if kinds else 1)


def test_another_fault_does_not_explain_a_run_without_a_claim() -> None:
    history = forgotten(4.9)
    history.faults = [fault("away", *ALL)]
    assert found(history) == WITHOUT_CLAIM


@pytest.mark.parametrize(
    ("by_s", "kinds"), [(9, set()), (15, {"late"}), (26, {"late"}), (29, set())]
)
def test_a_task_finished_after_the_deadline_is_late(by_s: int, kinds: set[str]) -> None:
    history = lapsed()
    history.faults = [fault("dead", "w1@x/")]
    verdict = Checker(history, quiet_us=NOW + 60 * S, by_us=NOW + by_s * S).verdict()
    assert set(verdict.counts()) == kinds


def test_a_task_that_never_ends_is_reported_once_as_stuck() -> None:
    history = lapsed()
    history.faults = [fault("dead", "w1@x/")]
    history.changes = history.changes[:-1]
    for quiet_s in (30, 60):  # its lease is still valid, and is over
        verdict = Checker(history, quiet_us=NOW + quiet_s * S, by_us=NOW + 29 * S).verdict()
        assert verdict.counts() == {"stuck": 1}


@pytest.mark.parametrize(("lapses", "is_lost"), [(4, True), (5, False)])
def test_a_task_whose_workers_all_died_is_not_lost(lapses: int, is_lost: bool) -> None:
    failed = RowChange(1, NOW, Status.RUNNING, Status.FAILED, 9, 10, 5, lapses, NOW, None, None)
    assert ("lost" in found(History(calls("ok"), [], [failed]))) == is_lost


def test_rows_that_a_process_claims_while_it_runs_another_one_are_counted() -> None:
    """Process a claims the rows 1 and 2, and row 3 while it runs row 1. Process b has row 4."""
    claims = [(1, NOW, "a"), (2, NOW, "a"), (3, NOW + 2 * S, "a"), (4, NOW + 2 * S, "b")]
    changes = [
        RowChange(id, at, Status.NOT_COMPLETE, Status.RUNNING, 0, 1, 1, 0, NOW, at + 4 * S, worker)
        for id, at, worker in claims
    ]
    spans = [(1, NOW + S, NOW + 3 * S), (2, NOW + 3 * S, NOW + 4 * S)]
    runs = [RunRecord(number, 1, "a", began, ended) for number, began, ended in spans]
    assert claimed_ahead(History([], runs, changes)) == 1


# The checker finds each way in which a durable Celery task may break its promises


WAITS, RUNS, DONE = Status.NOT_COMPLETE, Status.RUNNING, Status.DONE
CANCELLED, FAILED = Status.CANCELLED, Status.FAILED
#: The seconds of a row that is published as it should be, and its statuses from then on.
PUBLISHED = ((0, WAITS), (2, RUNS), (3, DONE))


def row(*statuses: tuple[float, Status], due: float = 2, lapses: int = 0) -> list[RowChange]:
    made: list[RowChange] = []
    for version, (second, status) in enumerate(statuses):
        was = statuses[version - 1][1] if version else None
        at_us, due_us = int(NOW + second * S), int(NOW + due * S)
        by = "w" if status is RUNS else None
        lease_us = at_us + 60 * S if status is RUNS else None
        old = version - 1 if version else None
        lost = lapses if version > 1 else 0
        made.append(RowChange(1, at_us, was, status, old, version, 0, lost, due_us, lease_us, by))
    return made


def found_of_messages(
    changes: list[RowChange],
    published: tuple[float, ...] = (2.5,),
    ran: tuple[float, ...] = (2.7,),
    answer: Any = "ok",
    revoke: CallRecord | None = None,
    faults: tuple[Fault, ...] = (),
) -> set[str]:
    call = CallRecord(1, "schedule", answer, NOW, NOW + 1000, NOW + 2 * S, 1000, is_celery=True)
    history = History(
        [call, *([revoke] if revoke else [])],
        changes=changes,
        faults=list(faults),
        publications=[records.PublishRecord(1, int(NOW + s * S)) for s in published],
        deliveries=[records.DeliveryRecord(1, int(NOW + s * S)) for s in ran],
    )
    return set(Checker(history, quiet_us=NOW + 60 * S).verdict().counts())


def revoked(second: float, answer: Any = "ok") -> CallRecord:
    asked_us = int(NOW + second * S)
    return CallRecord(1, "revoke", answer, asked_us, asked_us + 1000)


def message_fault(second: float, **effects: Any) -> Fault:
    at_us = int(NOW + second * S)
    return Fault("broker killed", "Redis", at_us, at_us + S, **effects)


TWICE = ((0, WAITS), (2, RUNS), (3, WAITS), (4, RUNS), (5, DONE))
#: The only claim comes after the first message.
LATE = ((0, WAITS), (5, RUNS), (6, DONE))
NEVER: dict[str, Any] = {"published": (), "ran": ()}
LOST, TWICE_PUBLISHED = {"lost"}, (2.5, 4.5)


@pytest.mark.parametrize("status", [DONE, FAILED, CANCELLED])
def test_a_row_that_ends_without_a_published_message_is_lost(status: Status) -> None:
    assert found_of_messages(row((0, WAITS), (2, RUNS), (3, status)), **NEVER) == LOST


@pytest.mark.parametrize("due", [2.6, 2])
def test_a_message_is_not_published_before_its_time(due: float) -> None:
    """Neither before the time of the row nor before that of the call."""
    assert found_of_messages(row((0, WAITS), (1, RUNS), (3, DONE), due=due), (1.5,)) == {"early"}


def test_a_message_is_not_published_without_a_claim() -> None:
    assert "unexpected" in found_of_messages(row(*PUBLISHED), (1.9, 2.5))


REVOKED = ((0, WAITS), (3, RUNS), (4, DONE))
#: The statuses of a row, what happened to its message, and what the checker finds.
MESSAGES: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "is published once and in time": (PUBLISHED, {}, set()),
    "of a row that was given up is lost": (((0, WAITS), (2, RUNS), (3, FAILED)), {}, LOST),
    "of an acknowledged call has a row": ((), NEVER, LOST),
    "of a call that was rolled back is not published": ((), {**NEVER, "answer": "failed"}, set()),
    "of a call that was rolled back is published": ((), {"answer": "failed"}, {"unexpected"}),
    "is published after its acknowledged revoke":
        (REVOKED, {"published": (3.5,), "revoke": revoked(1)}, {"revoked"}),
    "is published after a revoke of which nobody knows":
        (REVOKED, {"published": (3.5,), "revoke": revoked(1, "unknown")}, set()),
    "is being published and arrives after its revoke": (PUBLISHED, {"revoke": revoked(2.2)}, set()),
    "of a row that its revoke cancels is not published":
        (((0, WAITS), (1.0005, CANCELLED)), {**NEVER, "revoke": revoked(1)}, set()),
    "is published again without a fault": (TWICE, {"published": TWICE_PUBLISHED}, {"duplicated"}),
    "is published again because of a fault":
        (TWICE, {"published": TWICE_PUBLISHED, "faults": (message_fault(2.5),)}, set()),
    "is published again long before a fault":
        (TWICE, {"published": TWICE_PUBLISHED, "faults": (message_fault(30),)}, {"duplicated"}),
    "is published again within one claim": (PUBLISHED, {"published": (2.4, 2.5)}, {"duplicated"}),
    "is published again within one claim because of a fault":
        (PUBLISHED, {"published": (2.4, 2.5), "faults": (message_fault(2),)}, set()),
    "has no claim": (LATE, {"published": (2.5, 5.5)}, {"unexpected"}),
    "has a claim that a crash of the database lost":
        (LATE, {"published": (2.5, 5.5), "faults": (message_fault(3, loses_claims=True),)}, set()),
    "has a claim that no crash lost": (
        PUBLISHED,
        {"published": (2.5, 2.6), "faults": (message_fault(20, loses_claims=True),)},
        {"duplicated"},
    ),
    "has no claim long before a crash": (
        LATE,
        {"published": (2.5, 5.5), "faults": (message_fault(4, loses_claims=True),)},
        {"unexpected"},
    ),
    "does not reach its task": (PUBLISHED, {"ran": ()}, LOST),
    "does not reach its task because of a fault that loses none":
        (PUBLISHED, {"ran": (), "faults": (message_fault(2.5),)}, LOST),
    "does not reach its task because of a fault that loses some":
        (PUBLISHED, {"ran": (), "faults": (message_fault(2.5, loses_messages=True),)}, set()),
    "does not reach its task long before a fault that loses some":
        (PUBLISHED, {"ran": (), "faults": (message_fault(40, loses_messages=True),)}, LOST),
}  # fmt: skip


@pytest.mark.parametrize("what", MESSAGES)
def test_the_checker_judges_a_message_that(what: str) -> None:
    statuses, happened, kinds = MESSAGES[what]
    assert found_of_messages(row(*statuses), **happened) == kinds


# The checker finds each way in which a recurring schedule may break its promises


#: The occurrences of each schedule: five, one in each second.
FIRST, LAST = NOW + S, NOW + 5 * S


def found_of_schedules(
    *occurrences: Occurrence,
    missed: Literal["all", "latest"] = "all",
    overlap: Literal["allow", "skip"] = "allow",
) -> set[str]:
    some = records.Occurrences("report", S, FIRST, LAST, list(occurrences), missed, overlap)
    return set(Checker(History(occurrences=[some])).verdict().counts())


def ahead(*seconds: float) -> list[Occurrence]:
    """Occurrences whose tasks were made ten seconds before, and ended a moment after."""
    return tasks(*((s, s - 10, s + 0.001) for s in seconds))


MADE: list[Any] = [([1, 2, 3, 4, 5], set()), ([1, 2, 3, 4, 5, 6], set())]
MADE += [([1, 2, 2, 3, 4, 5], {"repeated"}), ([1, 2, 3, 3.5, 4, 5], {"unexpected"})]
MADE += [(some, {"left out"}) for some in ([1, 2, 4, 5], [2, 3, 4, 5], [1, 2, 3, 4], [])]


@pytest.mark.parametrize("missed", ["all", "latest"])
@pytest.mark.parametrize(("seconds", "kinds"), MADE)
def test_each_occurrence_has_exactly_one_task(seconds: Any, kinds: set[str], missed: Any) -> None:
    assert found_of_schedules(*ahead(*seconds), missed=missed) == kinds


@pytest.mark.parametrize(("missed", "kinds"), [("all", {"left out"}), ("latest", set())])
def test_after_an_outage_only_the_latest_may_have_a_task(missed: Any, kinds: set[str]) -> None:
    """No sweep takes place from the second occurrence until after the fourth one."""
    late = Occurrence(NOW + 4 * S, NOW + 4 * S + S // 2, NOW + 4 * S + S // 2)
    assert found_of_schedules(*ahead(1), late, *ahead(5), missed=missed) == kinds


def test_the_latest_occurrence_of_an_outage_has_a_task() -> None:
    """The fourth occurrence has passed when the fifth gets its task before its time."""
    made_us = NOW + 4 * S + S // 2
    schedules = [*ahead(1, 2, 3), Occurrence(NOW + 5 * S, made_us)]
    assert found_of_schedules(*schedules, missed="latest") == {"left out"}


def tasks(*times: tuple[float, float, float]) -> list[Occurrence]:
    """Occurrences, when their tasks were made, and when these ended."""
    return [Occurrence(*(int(NOW + s * S) for s in each)) for each in times]


def test_an_occurrence_is_skipped_while_the_task_before_it_runs() -> None:
    some = tasks((1, 0, 1.5), (2, 1.6, 3.7), (4, 3.8, 4.5), (5, 4.6, 5.1))
    assert found_of_schedules(*some, missed="latest", overlap="skip") == set()
    assert found_of_schedules(*some, missed="latest") == {"left out"}


def test_an_occurrence_is_not_skipped_after_the_task_before_it_has_ended() -> None:
    some = tasks((1, 0, 1.5), (2, 1.6, 2.2), (4, 2.3, 4.5), (5, 4.6, 5.1))
    assert found_of_schedules(*some, missed="latest", overlap="skip") == {"left out"}


def test_tasks_of_a_schedule_without_overlap_do_not_wait_for_each_other() -> None:
    some = tasks((1, 0, 1.5), (2, 1.4, 2.2), (3, 2.3, 3.1), (4, 3.2, 4.1), (5, 4.2, 5.1))
    assert found_of_schedules(*some, missed="latest", overlap="skip") == {"overlapped"}


def test_all_moves_of_the_table_are_legal() -> None:
    assert {(Status.NOT_COMPLETE, Status.RUNNING), (Status.RUNNING, Status.DONE)} <= _LEGAL


@pytest.mark.parametrize("failpoint", FAILPOINTS, ids=lambda failpoint: failpoint.name)
def test_each_failpoint_is_at_a_method_that_exists(failpoint: Failpoint) -> None:
    for path in failpoint.methods:
        assert callable(resolve_name(f"delaytasks.{path}"))
