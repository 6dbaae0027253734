"""The checker finds each way in which a durable Celery task may break its promises."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.checker import Checker
from chaos.history import (
    CallRecord,
    DeliveryRecord,
    Fault,
    History,
    PublishRecord,
    RowChange,
)
from delaytasks.core.states import Status

NOW = 1_700_000_000_000_000
S = 1_000_000
WAITS, RUNS, DONE = Status.NOT_COMPLETE, Status.RUNNING, Status.DONE
CANCELLED, FAILED = Status.CANCELLED, Status.FAILED
#: The seconds of a row that is published as it should be, and its statuses from then on.
PUBLISHED = ((0, WAITS), (2, RUNS), (3, DONE))


def row(*statuses: tuple[float, Status], due: float = 2, lapses: int = 0) -> list[RowChange]:
    changes: list[RowChange] = []
    for version, (second, status) in enumerate(statuses):
        was = statuses[version - 1][1] if version else None
        at_us, due_us = int(NOW + second * S), int(NOW + due * S)
        worker = "w" if status is RUNS else None
        lease_us = at_us + 60 * S if status is RUNS else None
        before = version - 1 if version else None
        lost = lapses if version > 1 else 0
        changes.append(
            RowChange(1, at_us, was, status, before, version, 0, lost, due_us, lease_us, worker)
        )
    return changes


def found(
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
        publications=[PublishRecord(1, int(NOW + s * S)) for s in published],
        deliveries=[DeliveryRecord(1, int(NOW + s * S)) for s in ran],
    )
    return set(Checker(history, quiet_us=NOW + 60 * S).verdict().counts())


def revoked(second: float, answer: Any = "ok") -> CallRecord:
    asked_us = int(NOW + second * S)
    return CallRecord(1, "revoke", answer, asked_us, asked_us + 1000)


def fault(second: float, **effects: Any) -> Fault:
    at_us = int(NOW + second * S)
    return Fault("broker killed", "Redis", at_us, at_us + S, **effects)


def test_a_message_that_is_published_once_and_in_time_is_no_finding() -> None:
    assert found(row(*PUBLISHED)) == set()


@pytest.mark.parametrize("status", [DONE, FAILED, CANCELLED])
def test_a_row_that_ends_without_a_published_message_is_lost(status: Status) -> None:
    assert found(row((0, WAITS), (2, RUNS), (3, status)), (), ()) == {"lost"}


def test_a_row_that_was_given_up_is_lost_although_it_was_published() -> None:
    assert found(row((0, WAITS), (2, RUNS), (3, FAILED))) == {"lost"}


def test_an_acknowledged_call_without_a_row_is_lost() -> None:
    assert found([], (), ()) == {"lost"}


def test_a_call_that_was_rolled_back_is_never_published() -> None:
    assert found([], (), (), answer="failed") == set()
    assert found([], answer="failed") == {"unexpected"}


@pytest.mark.parametrize("due", [2.6, 2])
def test_a_message_is_not_published_before_its_time(due: float) -> None:
    """Neither before the time of the row nor before that of the call."""
    assert found(row((0, WAITS), (1, RUNS), (3, DONE), due=due), (1.5,)) == {"early"}


def test_a_message_is_not_published_without_a_claim() -> None:
    assert "unexpected" in found(row(*PUBLISHED), (1.9, 2.5))


def test_a_message_is_not_published_after_its_acknowledged_revoke() -> None:
    changes = row((0, WAITS), (3, RUNS), (4, DONE))
    assert found(changes, (3.5,), revoke=revoked(1)) == {"revoked"}
    assert found(changes, (3.5,), revoke=revoked(1, "unknown")) == set()


def test_a_message_that_is_being_published_may_arrive_after_its_revoke() -> None:
    assert found(row(*PUBLISHED), revoke=revoked(2.2)) == set()


def test_a_row_that_is_cancelled_by_its_revoke_is_no_finding() -> None:
    assert found(row((0, WAITS), (1.0005, CANCELLED)), (), (), revoke=revoked(1)) == set()


def test_a_message_is_published_again_only_because_of_a_fault() -> None:
    again = row((0, WAITS), (2, RUNS), (3, WAITS), (4, RUNS), (5, DONE))
    assert found(again, (2.5, 4.5)) == {"duplicated"}
    assert found(again, (2.5, 4.5), faults=(fault(2.5),)) == set()
    assert found(again, (2.5, 4.5), faults=(fault(30),)) == {"duplicated"}


def test_a_message_is_published_again_within_one_claim_only_because_of_a_fault() -> None:
    assert found(row(*PUBLISHED), (2.4, 2.5)) == {"duplicated"}
    assert found(row(*PUBLISHED), (2.4, 2.5), faults=(fault(2),)) == set()


def test_a_crash_of_the_database_may_lose_the_claim_of_a_published_message() -> None:
    assert found(row((0, WAITS), (5, RUNS), (6, DONE)), (2.5, 5.5)) == {"unexpected"}
    crash = fault(3, loses_claims=True)
    assert found(row((0, WAITS), (5, RUNS), (6, DONE)), (2.5, 5.5), faults=(crash,)) == set()
    assert found(row(*PUBLISHED), (2.5, 2.6), faults=(fault(20, loses_claims=True),)) == {
        "duplicated"
    }
    later = fault(4, loses_claims=True)
    assert found(row((0, WAITS), (5, RUNS), (6, DONE)), (2.5, 5.5), faults=(later,)) == {
        "unexpected"
    }


def test_a_confirmed_message_reaches_its_task_unless_a_fault_loses_messages() -> None:
    assert found(row(*PUBLISHED), ran=()) == {"lost"}
    assert found(row(*PUBLISHED), ran=(), faults=(fault(2.5),)) == {"lost"}
    assert found(row(*PUBLISHED), ran=(), faults=(fault(2.5, loses_messages=True),)) == set()
    assert found(row(*PUBLISHED), ran=(), faults=(fault(40, loses_messages=True),)) == {"lost"}
