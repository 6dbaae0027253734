"""Messages with an eta become rows once, whatever interrupts their adoption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu.transport.virtual.base import Base64

from delaytasks import DelayTask, Status
from delaytasks.durable_eta.redis_source import read_text
from delaytasks.durable_eta.stored_message import StoredMessage
from delaytasks.durable_eta.waiting_message import FoundMessage
from delaytasks.operations.eta_adoption import AdoptionResult, EtaAdoption
from delaytasks.wiring import wiring_of
from tests.conformance.durable_eta.conftest import Office
from tests.recording import run_now

FAR = datetime.now(timezone.utc) + timedelta(days=1)


def _own() -> None: ...


class Killed(BaseException):
    """The end of the process."""


class Shelf:
    """A broker's messages in memory, in the form in which Redis has them."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.read = 0
        self.is_killed = False

    def count(self) -> int:
        return len(self.texts)

    def batch(self) -> Sequence[FoundMessage]:
        found = self.texts[self.read : self.read + 3]
        self.read += len(found)
        return [FoundMessage(read_text(text), "office", text) for text in found]

    def remove(self, found: Sequence[FoundMessage]) -> int:
        if self.is_killed:
            raise Killed
        before = len(self.texts)
        for each in found:
            self.texts.remove(each.handle)
        self.read -= before - len(self.texts)
        return before - len(self.texts)

    def close(self) -> None:
        self.read = 0


def text(
    id: Any, eta: Any = FAR, task: Any = "durable.remind", args: Any = (1,), **headers: Any
) -> str:
    """Return a message of a Celery task as kombu writes it to Redis."""
    eta = eta.isoformat() if isinstance(eta, datetime) else eta
    message = {
        "body": Base64().encode(json.dumps([args, {}, {}])),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": id, "eta": eta, "retries": 0, **headers},
        "properties": {
            "correlation_id": str(id),
            "delivery_info": {"exchange": "", "routing_key": "office"},
            "body_encoding": "base64",
            "priority": 0,
        },
    }
    return json.dumps(message)


def adopt(office: Office, shelf: Shelf, **options: Any) -> AdoptionResult:
    w = wiring_of(office.delays)
    adoption = EtaAdoption(w.celery, w.celery_tasks, w.router, **options)
    adoption.adopt(shelf, lambda: None)
    return adoption.result


def due_and_message(row: DelayTask) -> tuple[datetime, StoredMessage]:
    return row.due, StoredMessage.of_body(row.body)


@pytest.mark.quick
def test_a_message_with_an_eta_becomes_a_row_with_its_id_and_due_time(office: Office) -> None:
    shelf = Shelf([text("a")])

    result = adopt(office, shelf)

    (row,) = office.rows()
    due, message = due_and_message(row)
    assert (row.key, due, row.status) == ("a", FAR, Status.NOT_COMPLETE)
    assert message.headers == {
        "lang": "py", "task": "durable.remind", "id": "a", "eta": None, "retries": 0
    }  # fmt: skip
    assert json.loads(message.body) == [[1], {}, {}]
    assert (message.exchange, message.routing_key) == ("", "office")
    assert (result.adopted, shelf.texts) == (1, [])


def test_messages_that_no_call_would_make_rows_stay_in_their_order(
    make_office: Callable[..., Office],
) -> None:
    office = make_office(durable_eta_min_s=3600)
    soon = datetime.now(timezone.utc) + timedelta(minutes=1)
    office.app.task(_own, name="own", durable_eta=False, shared=False)
    kept = [text("a", None), text("b", soon), text("c", task="own"), text("d", None)]
    shelf = Shelf([kept[0], text("far"), *kept[1:3], text("farther"), kept[3]])

    result = adopt(office, shelf)

    assert shelf.texts == kept
    assert {row.key for row in office.rows()} == {"far", "farther"}
    assert result.stay == {"no_eta": 2, "not_durable": 2}


def test_an_overdue_message_is_due_immediately(office: Office) -> None:
    adopt(office, Shelf([text("late", datetime(2020, 1, 1, tzinfo=timezone.utc))]))

    (row,) = office.rows()
    assert row.due <= datetime.now(timezone.utc) + timedelta(seconds=5)


def test_an_eta_without_a_time_zone_is_in_utc_as_for_a_worker(office: Office) -> None:
    office.app.conf.timezone = "Asia/Tokyo"

    adopt(office, Shelf([text("a", FAR.replace(tzinfo=None))]))

    assert office.rows()[0].due == FAR


def test_after_a_kill_between_commit_and_removal_the_row_is_found_again(office: Office) -> None:
    shelf = Shelf([text("a"), text("b")])
    shelf.is_killed = True
    with pytest.raises(Killed):
        adopt(office, shelf)
    assert len(shelf.texts) == 2
    shelf.is_killed = False
    # A worker may have received the message and given it back.
    shelf.texts[0] = text("a", redelivered=True)

    result = adopt(office, shelf)

    assert (result.adopted, result.existing, shelf.texts) == (0, 2, [])
    assert sorted(str(row.key) for row in office.rows()) == ["a", "b"]


@pytest.mark.parametrize("ending", ["done", "cancelled", "rescheduled"])
def test_a_message_whose_row_has_moved_since_gets_no_second_row(
    office: Office, ending: str
) -> None:
    adopt(office, Shelf([text("a", datetime(2020, 1, 1, tzinfo=timezone.utc), args=(7,))]))
    (row,) = office.rows()
    if ending == "done":
        assert run_now(office.delays, row).status is Status.DONE
    elif ending == "cancelled":
        assert office.delays.cancel(row)
    else:
        office.delays.reschedule(row, delay=86400)

    result = adopt(office, Shelf([text("a", datetime(2020, 1, 1, tzinfo=timezone.utc), args=(7,))]))

    assert (result.adopted, result.existing, len(office.rows())) == (0, 1, 1)


def test_two_calls_with_the_same_id_become_two_rows_whatever_is_repeated(office: Office) -> None:
    texts = [text("a"), text("a", FAR + timedelta(hours=1)), text("a", args=(2,)), text("a")]
    for _ in range(2):
        adopt(office, Shelf(texts))

    rows = office.rows()
    assert [row.key for row in rows] == ["a"] * 3
    assert sorted((row.due, due_and_message(row)[1].body) for row in rows) == [
        (FAR, "[[1], {}, {}]"),
        (FAR, "[[2], {}, {}]"),
        (FAR + timedelta(hours=1), "[[1], {}, {}]"),
    ]


def test_a_dry_run_counts_by_task_and_changes_nothing(office: Office) -> None:
    later = FAR + timedelta(hours=2)
    shelf = Shelf([text("a"), text("b", later), text("c", task="other"), text("d", None)])
    before = list(shelf.texts)

    result = adopt(office, shelf, is_dry_run=True)

    counts = {name: (found.count, found.first, found.last) for name, found in result.tasks.items()}
    assert counts == {"durable.remind": (2, FAR, later), "other": (1, FAR, FAR)}
    assert (shelf.texts, office.rows(), result.stay) == (before, [], {"no_eta": 1})


def test_a_dry_run_counts_the_rows_of_an_earlier_call(office: Office) -> None:
    adopt(office, Shelf([text("a")]))

    result = adopt(office, Shelf([text("a"), text("b")]), is_dry_run=True)

    assert (result.adopted, result.existing) == (1, 1)


def test_a_limit_leaves_the_other_messages(office: Office) -> None:
    shelf = Shelf([text(str(number)) for number in range(8)])

    assert adopt(office, shelf, limit=5).adopted == 5

    assert shelf.texts == [text(str(number)) for number in range(5, 8)]
    assert len(office.rows()) == 5


HOSTILE = {
    "bytes": "\x00\x01",
    "a number": "7",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no headers": json.dumps({"body": "", "properties": {}}),
    "headers of another kind": json.dumps({**json.loads(text("a")), "headers": []}),
    "protocol 1": json.dumps({**json.loads(text("a")), "headers": {}}),
    "an id that is a list": text(["a"]),
    "a name that is a number": text("a", task=7),
    "an eta that is a number": text("a", 7),
    "an eta that is no time": text("a", "soon"),
    "an eta far away": text("a", "9999-12-31T23:59:59+00:00"),
    "an eta beyond all times": text("a", "9999-12-31T23:59:59-23:00"),
    "a name with NUL": text("a", task="re\x00mind"),
    "a header with a lone surrogate": text("a", shadow="\ud800"),
    "a header that is no number": text("a", shadow=float("nan")),
    "a body above the limit": text("a", args=("x" * 300_000,)),
    "a body that is not base64": json.dumps({**json.loads(text("a")), "body": "\u00e9"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_stays_and_stops_no_other(office: Office, name: str) -> None:
    shelf = Shelf([text("before"), HOSTILE[name], text("after")])

    result = adopt(office, shelf)

    assert shelf.texts == [HOSTILE[name]]
    assert {row.key for row in office.rows()} == {"before", "after"}
    assert result.stay["unreadable"] + result.stay["refused"] == 1
    assert len(result.reasons) == 1
