"""Rows of delayed Celery tasks, on every database."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from celery import Celery, _state, group, signature, uuid
from celery.exceptions import Retry
from kombu import Connection, Exchange, Queue
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, Status
from tests.conftest import closing_all
from tests.refusals import invalid
from tests.world import MonkeyPatch, World
from tests.world.recording import record, refusing, run_now


def _remind(*args: Any, **kwargs: Any) -> None: ...


class Office:
    """The app and the timer of one test, and the queue of its messages."""

    def __init__(self, url: str, broker: str = "memory://", **settings: Any) -> None:
        self.queue = name = "office" + secrets.token_hex(4)
        self.app = Celery(name, broker=broker, backend="cache+memory://", set_as_current=False)
        self.app.conf.task_default_queue = self.queue
        settings = {"durable_eta": True, "table_prefix": "s_", **settings}
        self.delays = DelayTasks(self.app, url, **settings)
        self.timer = record(self.delays)
        self.remind = self.app.task(_remind, name="durable.remind")

    def close(self) -> None:
        self.delays.close()
        self.app.close()

    def rows(self) -> list[DelayedTask]:
        return list(self.delays.find(tag="celery:durable.remind"))

    def publish(self) -> DelayedTask:
        """Run the only row, and return it as it is then."""
        (row,) = self.rows()
        return run_now(self.delays, row)

    def published(self, queue_name: str = "") -> list[Any]:
        """Return the messages in a queue of the broker, which removes them."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[queue_name or self.queue](connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message)
        return found


@pytest.fixture
def make_office(world: World) -> Iterator[Callable[..., Office]]:
    with closing_all(partial(Office, world.url.render_as_string(hide_password=False))) as make:
        yield make


@pytest.fixture
def office(make_office: Callable[..., Office]) -> Office:
    return make_office()


# Which calls become rows, what the rows contain, and how they are published


Make = Callable[..., Office]


def _silent() -> None: ...


def test_a_call_is_a_row_whose_message_goes_where_the_app_routes_it(office: Office) -> None:
    routed = f"{office.queue}.routed"
    office.app.conf.task_routes = {"durable.remind": {"queue": routed}}
    result = office.remind.apply_async((7,), countdown=90)
    (row,) = office.rows()
    assert (row.tag, row.key, row.delay_s) == ("celery:durable.remind", result.id, 90)
    with pytest.raises(e.WaitTimeoutError, match=rf"wait with AsyncResult\('{result.id}'\)\.get"):
        office.delays.result(row, timeout=0)
    office.publish()
    assert len(office.published(routed)) == 1


#: It does not take the result of the task to which it is linked.
LINKED = signature("durable.add", (1, 2), immutable=True)
#: Stand for the connection and the producer of the app, and for its default queue.
OWN, QUEUE = "of the app's broker", "the default queue"
#: Options that are tested one by one, and those that belong together.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"time_limit": 50, "soft_time_limit": 40},
    {"serializer": "pickle", "compression": "bzip2"},
    {"retry": True, "retry_policy": {"max_retries": 1}},
    {"stamped_headers": ["tenant"], "tenant": "acme"},
    {"exchange": QUEUE, "routing_key": QUEUE},
    {"group_id": "g", "group_index": 2},
    {"link": [LINKED, LINKED]},
    {"expires": datetime(2040, 1, 1, tzinfo=timezone.utc)},
    *(
        {name: value}
        for name, value in {
            "connection": OWN, "producer": OWN, "publisher": OWN, "expires": 600,
            "headers": {"tenant": "acme", "size": 7}, "priority": 3, "serializer": "yaml",
            "compression": "zlib", "shadow": "durable.other", "timeout": 5, "confirm_timeout": 5,
            "link": LINKED, "link_error": LINKED, "delivery_mode": 1, "add_to_parent": False,
            "reply_to": "somewhere", "queue": QUEUE, "root_id": "r", "parent_id": "p",
            "ignore_result": False, "retries": 2, "expiration": 60, "message_id": "m",
        }.items()
    ),
]  # fmt: skip


def test_the_published_message_is_the_one_that_celery_would_have_sent(office: Office) -> None:
    values: dict[Any, Any] = {QUEUE: office.queue}
    for options in OPTIONS:
        with office.app.connection_for_write() as connection:
            producer = office.app.amqp.Producer(connection)
            values[OWN] = connection if "connection" in options else producer
            call = {
                name: values.get(value, value) if isinstance(value, str) else value
                for name, value in options.items()
            }
            call |= {"args": (7,), "kwargs": {"word": "é"}, "task_id": uuid()}
            office.remind.apply_async(**call, countdown=90)
            [row] = [row for row in office.rows() if row.key == call["task_id"]]
            assert run_now(office.delays, row).status is Status.DONE, options
            office.remind.apply_async(**call)
        ours, bare = office.published()
        for message in (ours, bare):
            message.headers.pop("expires")  # from the call, which was a moment later
            if "expires" in options:
                assert int(message.properties.pop("expiration")) > 590_000
            message.properties.pop("delivery_tag")
        for part in ("body", "headers", "properties", "content_type"):
            assert getattr(ours, part) == getattr(bare, part), options


def test_a_body_is_published_without_reading_it_and_with_headers_that_json_has_no_form_for(
    office: Office, monkeypatch: MonkeyPatch
) -> None:
    at = datetime(2030, 1, 1, tzinfo=timezone.utc)
    headers = {"at": at, "sum": Decimal("1.5"), "raw": b"\xff"}
    options = {"serializer": "pickle", "compression": "zlib", "headers": headers}
    office.remind.apply_async(({1, 2},), countdown=90, **options)
    monkeypatch.setattr(pickle, "loads", pytest.fail)
    monkeypatch.setattr("kombu.serialization.pickle_loads", pytest.fail)

    assert office.publish().status is Status.DONE

    monkeypatch.undo()
    (message,) = office.published()
    message.accept = {"application/x-python-serialize"}
    assert message.payload[0] == ({1, 2},)
    assert {name: message.headers[name] for name in headers} == headers


def test_a_call_that_a_row_cannot_express_is_refused(office: Office) -> None:
    call = partial(office.remind.apply_async, countdown=90)
    with invalid("body", match=r"remind.*262,144.*durable_eta=False"):
        call(("x" * 300_000,))
    with pytest.raises((e.InvalidInputError, TypeError)):
        call((7,), headers={"odd": object()})
    with invalid("queue", match="task_queues"):
        call((7,), queue=Queue("own", Exchange("own"), routing_key="own"))
    with (
        Connection("redis://elsewhere/0") as connection,
        pytest.raises(e.ConfigError, match="durable_eta=False"),
    ):
        call((7,), connection=connection)
    with invalid("delay") as caught:
        office.remind.apply_async(countdown=1e12)
    assert "stored data" not in str(caught.value), "the advice is about bodies only"
    assert office.rows() == []


def test_a_row_that_is_no_celery_message_fails_and_delays_no_other(office: Office) -> None:
    bodies: list[Any] = [{"order": 7}, [], "text", None, {"typed": "{"}]
    bodies.append({"body": "x", "headers": 1})
    strange = [office.delays.schedule_delay("celery:durable.remind", body, 60) for body in bodies]
    good = office.remind.apply_async((7,), countdown=60)

    ended = {row.key: run_now(office.delays, row) for row in office.rows()}

    assert ended[good.id].status is Status.DONE
    assert {office.delays.get(task).status for task in strange} == {Status.FAILED}
    assert "is not a Celery message" in str(office.delays.get(strange[0]).error)


def test_rows_wait_until_the_broker_is_available_again(make_office: Make) -> None:
    broken, office = make_office("amqp://127.0.0.1:1//"), make_office()
    office.remind.apply_async((7,), countdown=90)
    (row,) = office.rows()

    waiting = run_now(broken.delays, row)

    assert (waiting.status, waiting.runs) == (Status.NOT_COMPLETE, 0)
    assert broken.delays.events.counts["celery_task.not_published"] == 1
    assert office.publish().status is Status.DONE
    assert len(office.published()) == 1
    broken.remind.apply_async((7,), countdown=90)
    assert len(office.rows()) == 2, "to write a row, no broker is needed"


# -- which calls become rows -------------------------------------------------------------------


def test_the_task_and_the_call_decide_before_the_setting(make_office: Make) -> None:
    office = make_office(durable_eta=False)
    office.remind.apply_async((1,), countdown=90)
    office.remind.apply_async((2,), countdown=90, durable_eta=True)
    office.remind.durable_eta = True
    office.remind.apply_async((3,), countdown=90)
    office.remind.apply_async((4,), countdown=90, durable_eta=False)

    assert len(office.rows()) == 2
    assert [message.payload[0] for message in office.published()] == [[1], [4]]


def test_the_delay_decides_if_the_setting_is_one(make_office: Make) -> None:
    office, now = make_office(durable_eta=30), datetime.now(timezone.utc)
    for soon in ({"countdown": 20}, {"eta": now + timedelta(seconds=20)}, {"countdown": -1}):
        office.remind.apply_async((7,), **soon)
    assert (len(office.published()), office.rows()) == (3, [])
    tomorrow = now + timedelta(days=1)  # a countdown goes before an eta
    for later in ({"countdown": 90, "eta": tomorrow}, {"eta": tomorrow}):
        office.remind.apply_async((7,), **later)
    assert [row.delay_s <= 90 for row in office.rows()] == [True, False]


# -- revoke ------------------------------------------------------------------------------------


def test_a_revoked_message_of_a_dead_worker_is_not_published(world: World, office: Office) -> None:
    """The worker has claimed the row, and is killed before it publishes the message."""
    result = office.remind.apply_async((7,), countdown=90)
    (row,) = office.rows()
    world.advance(100)
    assert world.claim(world.read(row))

    result.revoke()
    assert world.lapse(row) == 1

    assert office.publish().status is Status.CANCELLED
    assert office.published() == []


def test_the_row_of_a_recurring_celery_task_is_revoked_by_its_id(office: Office) -> None:
    office.delays.recurring.set("nightly", office.remind, every="1h")
    task = office.delays.recurring.schedule_now("nightly")
    other = office.delays.schedule_delay("mail", {"task": "durable.remind"}, 90)

    for id in (task.id, other.id, 2**64, "²"):
        office.app.control.revoke(str(id))

    assert office.delays.get(task).status is Status.CANCELLED
    assert office.app.AsyncResult(str(task.id)).state == "REVOKED"
    assert office.delays.get(other).status is Status.NOT_COMPLETE


# -- names and ids -----------------------------------------------------------------------------


def test_two_waiting_tasks_can_have_one_id_and_are_revoked_together(office: Office) -> None:
    office.remind.apply_async(("a",), countdown=90, task_id="one")
    result = office.remind.apply_async(("b",), countdown=91, task_id="one")
    named = office.delays.get(tag="celery:durable.remind", key="one")
    assert [row.id for row in office.rows()][1] == named.id

    result.revoke()

    assert [row.status for row in office.rows()] == [Status.CANCELLED] * 2
    assert result.state == "REVOKED"


def test_long_names_and_ids_are_shortened_and_stay_different(office: Office) -> None:
    for end in "ab":
        task = office.app.task(_silent, name="shop." + "x" * 200 + end)
        for length in (300, 301):
            task.apply_async(countdown=90, task_id="x" * length)

    office.app.control.revoke("x" * 300)

    rows = list(office.delays.find())
    assert len({row.tag for row in rows}) == len({row.key for row in rows}) == 2
    assert len({(row.tag, row.key) for row in rows}) == len(rows) == 4
    assert len({row.key for row in rows if row.status is Status.CANCELLED}) == 1


# Celery tasks that are called in a transaction of the caller


@contextmanager
def running(office: Office, task_id: str) -> Iterator[None]:
    """Act as the worker that runs the task."""
    task = office.remind
    _state._task_stack.push(task)
    task.push_request(id=task_id, called_directly=False, args=(7,), kwargs={}, retries=0)
    try:
        yield
    finally:
        task.pop_request()
        _state._task_stack.pop()


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    with Session(world.engine) as made:
        yield made


def test_calls_take_part_in_the_transaction_of_a_session(make_office: Make, session: Any) -> None:
    office = make_office(durable_eta=False)
    with office.delays.transaction(session):
        delayed = office.remind.apply_async((7,), countdown=5, durable_eta=True)
        other = office.delays.schedule_delay("mail", 1, 60)
        assert office.delays.get(other).body == 1
    immediate = office.delays.apply_async(office.remind.s(8), session=session)
    tasks = group(office.remind.s(number) for number in range(3))
    office.delays.apply_async(tasks, countdown=3600, session=session)
    found = list(office.delays.find()), office.timer.ids, office.published()
    assert found == ([], [], []), "before the commit"

    session.commit()

    rows = {row.key: row for row in office.rows()}
    assert office.timer.ids == [rows[delayed.id].id, rows[immediate.id].id]
    assert len(rows) == 5
    assert run_now(office.delays, rows[immediate.id]).status is Status.DONE
    (message,) = office.published()
    assert (message.headers["id"], message.payload[0]) == (immediate.id, [8])


def test_a_retry_survives_the_rollback_of_its_transaction(office: Office, session: Session) -> None:
    with running(office, "one"), office.delays.transaction(session):
        with pytest.raises(Retry):
            office.remind.retry(countdown=60)
        session.rollback()

    assert [row.key for row in office.rows()] == ["one"]


def test_a_retry_goes_to_the_broker_if_its_row_cannot_be_written(office: Office) -> None:
    with refusing(office.delays, e.StoreUnavailableError("as asked")):
        with pytest.raises(e.StoreUnavailableError):
            office.remind.apply_async((7,), countdown=60)
        with running(office, "one"), pytest.raises(Retry):
            office.remind.retry(countdown=60)
    with running(office, "large"), pytest.raises(Retry):
        office.remind.retry(args=("x" * 300_000,), countdown=60)

    one, large = office.published()
    assert [each.headers["id"] for each in (one, large)] == ["one", "large"]
    assert one.headers["eta"] is not None
    assert office.delays.events.counts["celery_task.not_stored"] >= 1


def test_a_revocation_is_rolled_back_with_its_transaction(office: Office, session: Session) -> None:
    result = office.remind.apply_async((7,), countdown=60)
    with office.delays.transaction(session):
        result.revoke()
    session.rollback()
    assert (office.rows()[0].status, result.state) == (Status.NOT_COMPLETE, "PENDING")

    with office.delays.transaction(session):
        result.revoke()
    assert result.state == "PENDING"
    session.commit()

    assert (office.rows()[0].status, result.state) == (Status.CANCELLED, "REVOKED")
