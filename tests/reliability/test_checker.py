"""How the checker judges what nobody knows, and what explains what."""

from __future__ import annotations

import pytest

from chaos.checker import Checker
from chaos.history import Answer, Change, Fault, History, Ran, Told, Victim
from delaytasks.core.states import Status

NOW = 1_700_000_000_000_000
S = 1_000_000


def told(*answers: Answer) -> list[Told]:
    """One task, scheduled again and again with its id, to run at once."""
    times = [(answer, NOW + n * S) for n, answer in enumerate(answers)]
    return [Told(1, "schedule", answer, at_us, at_us + S // 2, at_us) for answer, at_us in times]


def life(at_us: int) -> tuple[list[Change], list[Ran]]:
    """A row that is written, runs and ends."""
    moves = [(None, Status.NOT_COMPLETE), (Status.NOT_COMPLETE, Status.RUNNING), (Status.RUNNING, Status.DONE)]
    changes = [
        Change(1, at_us + n * 1000, was, status, n - 1 if n else None, n, min(n, 1), 0, at_us, None, None)
        for n, (was, status) in enumerate(moves)
    ]
    return changes, [Ran(1, 1, "w", at_us + 1500, at_us + 1800)]


def found(history: History) -> set[str]:
    return set(Checker(history, quiet_us=NOW + 60 * S).verdict().counts())


@pytest.mark.parametrize("answers", [("unknown",), ("unknown", "unknown"), ("unknown", "failed"), ("unknown", "ok")])
def test_what_is_unknown_may_be_done(answers: tuple[Answer, ...]) -> None:
    changes, ran = life(NOW + 3 * S)
    assert found(History(told(*answers), ran, changes)) == set()


@pytest.mark.parametrize(
    ("answers", "kinds"),
    [(("unknown",), set()), (("failed",), set()), (("unknown", "failed"), set()), (("unknown", "ok"), {"lost"})],
)
def test_what_is_unknown_may_not_be_done_until_somebody_says_that_it_is(
    answers: tuple[Answer, ...], kinds: set[str]
) -> None:
    assert found(History(told(*answers))) == kinds


def test_what_was_refused_is_not_done() -> None:
    changes, ran = life(NOW + 3 * S)
    assert found(History(told("failed", "failed"), ran, changes)) == {"unexpected"}


def test_a_time_that_nobody_knows_is_not_early() -> None:
    """A producer that is killed while it reschedules can not say to when."""
    changes, ran = life(NOW)
    asked = [Told(1, "schedule", "ok", NOW - 9 * S, NOW - 8 * S, NOW + 9 * S)]
    assert found(History(asked, ran, changes)) == {"early"}
    assert found(History([*asked, Told(1, "reschedule", "unknown", NOW - 7 * S, NOW)], ran, changes)) == set()


def test_what_is_unknown_is_not_done_early() -> None:
    changes, ran = life(NOW - 3 * S)
    asked = [Told(1, "schedule", "unknown", NOW - 5 * S, NOW - 4 * S, NOW)]
    assert found(History(asked, ran, changes)) == {"early"}


@pytest.mark.parametrize(
    ("victim", "kinds"),
    [("worker", set()), ("database", set()), ("machine", set()), ("broker", {"duplicated"}), ("beat", {"duplicated"})],
)
def test_a_task_that_ran_twice_has_no_reason_in_what_its_worker_does_not_need(victim: Victim, kinds: set[str]) -> None:
    before = [
        Change(1, NOW, None, Status.NOT_COMPLETE, None, 0, 0, 0, NOW, None, None),
        Change(1, NOW + S, Status.NOT_COMPLETE, Status.RUNNING, 0, 1, 1, 0, NOW, NOW + 5 * S, "w"),
        Change(1, NOW + 6 * S, Status.RUNNING, Status.NOT_COMPLETE, 1, 2, 1, 1, NOW, None, None),
        Change(1, NOW + 7 * S, Status.NOT_COMPLETE, Status.RUNNING, 2, 3, 2, 1, NOW, NOW + 11 * S, "w"),
        Change(1, NOW + 8 * S, Status.RUNNING, Status.DONE, 3, 4, 2, 0, NOW, None, "w"),
    ]
    ran = [Ran(1, 1, "w", NOW + S), Ran(1, 3, "w", NOW + 7 * S, NOW + 8 * S)]
    fault = Fault("as asked", "x", NOW + 2 * S, NOW + 3 * S, victim)
    assert found(History(told("ok"), ran, before, [fault])) == kinds
