"""Test brokers and databases that are unreachable, slow, or interrupt connections.

Callers wait within the limits, no task is lost, and no task runs twice.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue
from sqlalchemy import Engine, create_engine, func, make_url, select, text

from delaytasks import DelayTask, DelayTasks, NewTask, Status
from delaytasks.core import clock as clock_module
from delaytasks.core import errors as e
from delaytasks.timers.connection_limits import CONNECT_STEP_S
from delaytasks.wiring import wiring_of
from tests.conftest import open_store
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment, Process
from tests.services import kill_connections
from tests.waiting import wait_until

LIMIT_S = 0.5
INSERT, COMMIT = rb"INSERT INTO|EXECUTE ", rb"COMMIT(?!TED)"
#: A busy machine adds up to this many seconds to a call.
SLACK_S = 0.4
#: Connecting in a background thread may take this many seconds.
CONNECTS_S = 2 * CONNECT_STEP_S + SLACK_S
#: This outage is longer than a worker's pauses between two attempts to connect.
AWAY_S = 13
#: The sum of a worker's longest pause and the longest attempt to connect.
RECONNECTS_S = 4 + 4


class Line:
    """Provide a `DelayTasks` whose connections go through proxies."""

    def __init__(self, database_url: str, broker_url: str, **settings: Any) -> None:
        self.database, self.broker = proxy_to(database_url), proxy_to(broker_url)
        self.namespace = "out" + secrets.token_hex(4)
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.delays = self.connect(database_url, broker_url, **settings)
        self.store = open_store(database_url, table_prefix=self.namespace + "_")
        self._broker_url = broker_url

    def connect(self, database_url: str, broker_url: str, **settings: Any) -> DelayTasks:
        app = Celery("producer", broker=self.broker.url(broker_url), set_as_current=False)
        names = {"namespace": self.namespace, "table_prefix": self.namespace + "_"}
        delays = DelayTasks(app, self.database.url(database_url), **names, **settings)
        delays.events.subscribe(lambda name, fields: self.seen.append((name, fields)))
        return delays

    def warm_up(self) -> None:
        """Open all connections before the test."""
        self.delays.schedule_delay("mail", {}, 5)
        self.delays.schedule_delay("mail", {}, 3600, key="warm")
        wait_until(lambda: self.arrived() == 1, 5, "the first message")

    def rows(self) -> int:
        with self.store.database.auto.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(self.store.schema.tasks)
            ).scalar_one()

    def count(self, event: str) -> int:
        return self.delays.events.counts[event]

    def arrived(self) -> int:
        """Return the number of messages in the broker."""
        with Celery(
            "reader", broker=self._broker_url, set_as_current=False
        ).connection_for_write() as connection:
            queue = wiring_of(self.delays).publisher.queue("default")(connection)
            return int(queue.queue_declare(passive=False).message_count)

    def close(self) -> None:
        self.database.heal()
        self.broker.heal()
        self.delays.close()
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
        self.store.close()
        self._forget_queue()
        self.database.close()
        self.broker.close()

    def _forget_queue(self) -> None:
        """Delete the queue, its exchange, and the keys that kombu leaves in Redis."""
        if self._broker_url.startswith("redis"):
            with redis.Redis.from_url(self._broker_url) as client:
                for key in client.scan_iter(f"*{self.namespace}*", 1000):
                    client.delete(key)
            return
        with Celery(
            "reader", broker=self._broker_url, set_as_current=False
        ).connection_for_write() as connection:
            queue = wiring_of(self.delays).publisher.queue("default")(connection)
            queue.delete()
            queue.exchange.delete()


Connect = Callable[..., Line]


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    made: list[Line] = []

    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> Line:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        made.append(Line(*urls, **settings))
        return made[-1]

    yield new
    for line in made:
        line.close()


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


# -- the broker is unreachable --------------------------------------------------------------------

BROKERS = pytest.mark.parametrize("broker", ["redis", "rabbitmq"])


@BROKERS
@pytest.mark.parametrize("outage", ["refuse", "swallow"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_scheduling_goes_on_without_the_broker(
    connect: Connect, broker: str, outage: str, is_warm: bool
) -> None:
    line = connect(broker=broker)
    delays = line.delays
    if is_warm:
        line.warm_up()
    else:
        # This call opens a connection to the database only.
        delays.schedule_delay("mail", {}, 3600)
    before = line.rows()
    getattr(line.broker, outage)()
    took = seconds(lambda: delays.schedule_delay("mail", {}, 5))
    assert took < LIMIT_S + SLACK_S
    assert line.rows() == before + 1
    if broker == "rabbitmq" and outage == "swallow" and is_warm:
        # AMQP does not confirm the publication. The message is lost, and the sweep finds the
        # overdue row.
        return
    assert not wiring_of(delays).timer.is_up

    # While one thread connects, and during the pause after an attempt, other callers do not wait,
    # and no further event reports the outage.
    assert seconds(lambda: [delays.schedule_delay("mail", {}, 5) for _ in range(5)]) < LIMIT_S
    wait_until(lambda: line.count("timer.down") == 1, CONNECTS_S, "the broker to be given up")
    assert not wiring_of(delays).timer.is_up
    assert line.rows() == before + 6
    assert line.count("timer.down") == 1

    line.broker.heal()
    already = line.arrived()

    def schedule() -> bool:
        delays.schedule_delay("mail", {}, 5)
        return wiring_of(delays).timer.is_up

    wait_until(schedule, 5, "the timer to be up again", every_s=0.1)
    assert line.count("timer.up") == 1
    wait_until(lambda: line.arrived() > already, 5, "a message to arrive")


@BROKERS
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_a_slow_broker_makes_no_caller_wait_longer_than_the_limit(
    connect: Connect, broker: str, is_warm: bool
) -> None:
    line = connect(broker=broker)
    if is_warm:
        line.warm_up()
    else:
        line.delays.schedule_delay("mail", {}, 3600)
    # Each direction is slow, but no single step reaches the limit.
    line.broker.delay_s = 0.1
    for _ in range(3):
        assert seconds(lambda: line.delays.schedule_delay("mail", {}, 5)) < LIMIT_S + SLACK_S
    line.broker.delay_s = 0
    wait_until(lambda: line.arrived() > 0, 10, "what was sent to arrive all the same")


@BROKERS
def test_callers_in_many_threads_do_not_queue_up_for_a_black_hole(
    connect: Connect, broker: str
) -> None:
    line = connect(broker=broker, pool_size=10)
    line.delays.schedule_delay("mail", {}, 3600)
    line.broker.swallow()
    with ThreadPoolExecutor(8) as pool:
        times = list(
            pool.map(
                lambda _: seconds(lambda: line.delays.schedule_delay("mail", {}, 5)), range(16)
            )
        )
    assert max(times) < LIMIT_S + SLACK_S
    assert line.broker.accepted == 1, "one finds out, and the others hear of it"
    assert line.rows() == 17


@BROKERS
def test_a_connection_that_was_reset_is_made_anew(connect: Connect, broker: str) -> None:
    line = connect(broker=broker)
    line.warm_up()
    line.broker.reset()

    def schedule() -> bool:
        line.delays.schedule_delay("mail", {}, 5)
        return line.arrived() > 1

    wait_until(schedule, 5, "messages to arrive again", every_s=0.2)


def test_what_the_broker_refuses_is_not_the_callers_business(connect: Connect) -> None:
    line = connect(broker="rabbitmq")
    line.warm_up()
    line.broker.cut_request(b"delaytasks.run")
    task = line.delays.schedule_delay("mail", {}, 5)
    wait_until(lambda: line.broker.cut == 1, 5, "the message to be cut off on its way")
    assert line.delays.get(task).status is Status.NOT_COMPLETE


@BROKERS
def test_arming_in_the_background_never_waits(connect: Connect, broker: str) -> None:
    line = connect(broker=broker, arm="background")
    delays = line.delays
    delays.schedule_delay("mail", {}, 3600)
    line.broker.swallow()
    times = [seconds(lambda: delays.schedule_delay("mail", {}, 5)) for _ in range(10)]
    assert max(times) < LIMIT_S
    wait_until(lambda: line.count("timer.down") == 1, 5, "the thread to notice")
    line.broker.heal()

    def schedule() -> bool:
        delays.schedule_delay("mail", {}, 5)
        return wiring_of(delays).timer.is_up

    wait_until(schedule, 5, "the timer to be up again", every_s=0.1)
    delays.close()
    assert line.arrived() > 0


def backend(engine: Engine) -> int:
    """Return the id of the server process of a pooled connection."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


@BROKERS
@pytest.mark.parametrize("arm", ["inline", "background"])
def test_a_forked_child_schedules_over_connections_of_its_own(
    connect: Connect, broker: str, arm: str
) -> None:
    line = connect(broker=broker, arm=arm)
    line.warm_up()
    accepted = line.broker.accepted
    sessions = {
        backend(engine)
        for engine in (
            wiring_of(line.delays).store.database.auto,
            wiring_of(line.delays).store.database.tx,
        )
    }
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for engine in (
                wiring_of(line.delays).store.database.auto,
                wiring_of(line.delays).store.database.tx,
            ):
                assert backend(engine) not in sessions
            for _ in range(50):
                line.delays.schedule_delay("mail", {"from": "child"}, 5)
            line.delays.close()
            status = 0
        finally:
            os._exit(status)
    for _ in range(50):
        line.delays.schedule_delay("mail", {"from": "parent"}, 5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tasks = list(line.delays.find(limit=1000))
    assert len({task.id for task in tasks}) == len(tasks) == 102
    assert [task.body for task in tasks].count({"from": "child"}) == 50
    assert line.broker.accepted > accepted
    assert backend(wiring_of(line.delays).store.database.auto) in sessions, (
        "the child closed what is its parent's"
    )
    # Closing sends the messages that wait in the background.
    line.delays.close()
    if arm == "inline":
        assert line.arrived() == 101
    # The parent's connections still work.
    line.delays.schedule_delay("mail", {}, 5)


# -- the database interrupts connections ----------------------------------------------------------

DATABASES = pytest.mark.parametrize("database", ["postgresql", "mysql"])


@DATABASES
def test_connections_killed_between_calls_are_made_anew(
    connect: Connect, database: str, request: pytest.FixtureRequest
) -> None:
    line = connect(database)
    url = request.getfixturevalue(f"{database}_url")
    d = line.delays
    line.warm_up()
    failed = d.schedule_delay("mail", {}, 3600)
    calls: list[Callable[[], Any]] = [
        lambda: d.schedule_delay("mail", {}, 60),
        lambda: d.schedule_delay("mail", {}, 60, key="k", on_conflict="replace"),
        lambda: d.schedule_many([("mail", {}, 60)] * 3),
        lambda: d.schedule_many(
            [NewTask("mail", {}, 60), NewTask("mail", {}, 60, key="l")], on_conflict="keep"
        ),
        lambda: d.reschedule(tag="mail", key="warm", delay=50),
        lambda: d.touch(tag="mail", key="warm", delay=60),
        lambda: d.get(failed),
        lambda: d.find(),
        lambda: d.cancel(failed),
        lambda: d.retry(failed),
        lambda: wiring_of(d).sweeper.sweep(),
    ]
    for call in calls:
        assert kill_connections(url) >= 1
        call()
    assert line.rows() == 3 + 1 + 1 + 3 + 2


ONE_ROW: list[tuple[str, int, Callable[[DelayTasks], Any]]] = [
    ("plain", 1, lambda d: d.schedule_delay("mail", {"n": 1}, 60)),
    ("keyed", 1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="k")),
    ("kept", 1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="k", on_conflict="keep")),
    ("own id", 1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, id=4711)),
    ("many", 20, lambda d: d.schedule_many([("mail", {"n": n}, 60) for n in range(20)])),
    (
        "lot",
        3,
        lambda d: d.schedule_many(
            [("mail", {}, 60), ("mail", {}, 60), NewTask("mail", {}, 60, key="k")]
        ),
    ),
]


@DATABASES
@pytest.mark.parametrize("moment", ["request", "answer", "commit", "commit answer"])
@pytest.mark.parametrize(("name", "rows", "schedule"), ONE_ROW, ids=[case[0] for case in ONE_ROW])
def test_a_connection_cut_while_scheduling_makes_no_second_row(
    connect: Connect,
    database: str,
    moment: str,
    name: str,
    rows: int,
    schedule: Callable[[DelayTasks], Any],
) -> None:
    line = connect(database)
    line.warm_up()
    before = line.rows()
    cut = line.database.cut_answer if "answer" in moment else line.database.cut_request
    is_copied = database == "postgresql" and name in ("many", "lot")
    cut(COMMIT if "commit" in moment else rb"COPY " if is_copied else INSERT)
    schedule(line.delays)
    autocommitted = name in ("plain", "own id")
    assert line.database.cut == (0 if autocommitted and "commit" in moment else 1)
    line.database.heal()
    assert line.rows() == before + rows
    found = [task.body for task in line.delays.find(limit=100) if task.delay_s == 60]
    assert len(found) == rows


@DATABASES
@pytest.mark.parametrize("moment", ["request", "answer"])
@pytest.mark.parametrize("key", [None, "k"])
def test_an_unknown_outcome_names_the_id_and_scheduling_again_with_it_is_safe(
    connect: Connect, database: str, moment: str, key: str | None
) -> None:
    line = connect(database)
    line.warm_up()
    before = line.rows()
    words = INSERT if key is None else COMMIT
    (line.database.cut_answer if moment == "answer" else line.database.cut_request)(words)
    watch_and_refuse(line.database)
    with pytest.raises(e.OutcomeUnknownError, match="scheduling again with id=") as caught:
        line.delays.schedule_delay("mail", {"n": 1}, 5, key=key)
    id = caught.value.id
    assert id is not None
    line.database.heal()
    messages = line.arrived()
    assert line.rows() == before + (moment == "answer")
    for _ in range(2):
        task = line.delays.schedule_delay("mail", {"n": 1}, 5, key=key, id=id)
        assert task.id == id
    assert line.rows() == before + 1
    wait_until(lambda: line.arrived() > messages, 5, "the row to be armed")


LOTS: list[tuple[str, int, Callable[[DelayTasks], Any]]] = [
    ("alike", 20, lambda d: d.schedule_many([("mail", {"n": n}, 60) for n in range(20)])),
    (
        "named",
        3,
        lambda d: d.schedule_many([NewTask("mail", {}, 60, id=id) for id in (4711, 4712, 4713)]),
    ),
]


@DATABASES
@pytest.mark.parametrize("moment", ["request", "answer"])
@pytest.mark.parametrize(("name", "rows", "schedule"), LOTS, ids=[case[0] for case in LOTS])
def test_of_many_whose_outcome_is_unknown_all_are_there_or_none(
    connect: Connect,
    database: str,
    moment: str,
    name: str,
    rows: int,
    schedule: Callable[[DelayTasks], Any],
) -> None:
    line = connect(database)
    line.warm_up()
    before = line.rows()
    (line.database.cut_answer if moment == "answer" else line.database.cut_request)(COMMIT)
    watch_and_refuse(line.database)
    with pytest.raises(e.OutcomeUnknownError, match="scheduling again with id=") as caught:
        schedule(line.delays)
    line.database.heal()
    assert line.rows() == before + (rows if moment == "answer" else 0)
    assert caught.value.id is not None
    if moment == "answer":
        assert line.delays.get(caught.value.id).tag == "mail", "the id of one of them"
    else:
        with pytest.raises(e.TaskNotFoundError):
            line.delays.get(caught.value.id)
    if name == "named":
        # The second call uses the same ids.
        schedule(line.delays)
        assert line.rows() == before + rows


def test_a_copy_that_is_cut_is_told_like_any_statement(connect: Connect) -> None:
    line = connect()
    line.warm_up()
    before = line.rows()
    line.database.cut_request(b"COPY ")
    watch_and_refuse(line.database)
    with pytest.raises(e.OutcomeUnknownError, match="scheduling again with id="):
        line.delays.schedule_many([("mail", {"n": n}, 60) for n in range(20)])
    line.database.heal()
    assert line.rows() == before


@DATABASES
@pytest.mark.parametrize(("name", "rows"), [("one", 1), ("many", 3)])
@pytest.mark.parametrize("moment", ["request", "answer"])
def test_a_statement_that_stands_alone_on_the_callers_connection_has_an_unknown_outcome_too(
    connect: Connect, database: str, name: str, rows: int, moment: str
) -> None:
    line = connect(database)
    line.warm_up()
    before = line.rows()

    def schedule(session: Any, id: int | None = None) -> Any:
        if name == "one":
            return line.delays.schedule_delay("mail", {}, 60, id=id, session=session)
        return line.delays.schedule_many(
            [("mail", {"n": n}, 60) for n in range(rows)], session=session
        )

    engine = create_engine(wiring_of(line.delays).store.database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        words = b"COPY " if (database, name) == ("postgresql", "many") else INSERT
        (line.database.cut_answer if moment == "answer" else line.database.cut_request)(words)
        with pytest.raises(e.OutcomeUnknownError, match="scheduling again with id=") as caught:
            schedule(connection)
        assert connection.invalidated, "the pool must not give it to anybody"
    assert line.rows() in (before, before + rows)
    if name == "one":
        with engine.connect() as connection:
            assert schedule(connection, caught.value.id).id == caught.value.id
        assert line.rows() == before + 1
    engine.dispose()


def watch_and_refuse(proxy: Proxy) -> None:
    """Make the database unreachable when a connection is cut."""

    def watch() -> None:
        wait_until(lambda: proxy.cut, 10, "the cut", every_s=0.0005)
        proxy.refuse()

    threading.Thread(target=watch, daemon=True).start()


MOVES: list[tuple[str, Callable[[DelayTasks, DelayTask], Any]]] = [
    ("cancel", lambda d, task: d.cancel(task)),
    ("reschedule", lambda d, task: d.reschedule(task, 50)),
]


@DATABASES
@pytest.mark.parametrize(("name", "move"), MOVES, ids=[case[0] for case in MOVES])
def test_a_move_whose_outcome_is_unknown_says_so(
    connect: Connect, database: str, name: str, move: Callable[[DelayTasks, DelayTask], Any]
) -> None:
    line = connect(database)
    line.warm_up()
    task = line.delays.schedule_delay("mail", {}, 3600)
    line.database.cut_answer(COMMIT)
    watch_and_refuse(line.database)
    with pytest.raises(e.OutcomeUnknownError, match=f"look at task {task.id}"):
        move(line.delays, task)
    line.database.heal()
    assert line.delays.get(task).version == 1, "and it was done"
    # A repeated call changes nothing.
    move(line.delays, task)


@DATABASES
def test_a_database_that_went_away_between_calls_leaves_no_doubt(
    connect: Connect, database: str
) -> None:
    line = connect(database)
    line.warm_up()
    line.database.refuse()
    for key in (None, "k"):
        with pytest.raises(e.StoreUnavailableError, match="cannot be reached"):
            line.delays.schedule_delay("mail", {}, 60, key=key)


@DATABASES
def test_a_connection_that_never_came_about_leaves_no_doubt(
    connect: Connect, database: str
) -> None:
    line = connect(database)
    line.warm_up()
    wiring_of(line.delays).store.close()
    line.database.swallow()
    with pytest.raises(e.StoreUnavailableError, match="cannot be reached"):
        line.delays.schedule_delay("mail", {}, 60)


CANARY = "s3cr3t-canary"


def away(line: Line, url: str, outage: str) -> DelayTasks:
    """Return a `DelayTasks` with secrets in its URLs and an unreachable database."""
    place = (
        make_url(url).set(username="canary", password=CANARY).render_as_string(hide_password=False)
    )
    delays = line.connect(place, f"redis://:{CANARY}@127.0.0.1/9")
    getattr(line.database, outage)()
    return delays


@DATABASES
@pytest.mark.parametrize(("outage", "limit_s"), [("refuse", 4), ("swallow", 7)])
def test_a_database_that_is_away_is_told_soon_and_without_secrets(
    connect: Connect,
    database: str,
    outage: str,
    limit_s: float,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = connect(database)
    delays = away(line, request.getfixturevalue(f"{database}_url"), outage)
    calls: list[Callable[[], Any]] = [lambda: delays.schedule_delay("mail", {"card": CANARY}, 60)]
    # Each call of the other outages waits until its limit, so only this outage tests all calls.
    if outage == "refuse":
        calls += [
            lambda: delays.get(1),
            lambda: delays.schedule_many([("mail", {"card": CANARY}, 60)]),
            lambda: delays.schedule_delay("mail", {"card": CANARY}, 60, key="k"),
            lambda: delays.cancel(1),
            lambda: delays.find(),
        ]
    with caplog.at_level(logging.DEBUG):
        for call in calls:
            began = time.monotonic()
            with pytest.raises(
                e.StoreUnavailableError, match="the database cannot be reached"
            ) as caught:
                call()
            assert time.monotonic() - began < limit_s
            assert CANARY not in everything_said(caught.value)
    assert CANARY not in caplog.text
    assert CANARY not in repr(line.seen)


BAD_URLS = [
    "postgresql://u:{}@host:port/db",
    "{}",
    "postgresql+nodriver://u:{}@host/db",
    "oracle://u:{}@host/db",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_is_none_is_a_wrong_setting_and_not_shown(url: str) -> None:
    delays = DelayTasks(
        Celery("producer", broker="memory://", set_as_current=False), url.format(CANARY)
    )
    with pytest.raises(e.ConfigError) as caught:
        delays.schedule_delay("mail", {}, 5)
    assert CANARY not in everything_said(caught.value)


def everything_said(error: BaseException | None) -> str:
    words = ""
    while error is not None:
        words += f"{error!s} {error!r} "
        error = error.__cause__ or error.__context__
    return words


@DATABASES
def test_an_error_of_the_database_does_not_show_the_body(connect: Connect, database: str) -> None:
    line = connect(database)
    line.warm_up()
    column = (
        "MODIFY message_body varchar(5)"
        if database == "mysql"
        else "ALTER COLUMN message_body TYPE varchar(5)"
    )
    with line.store.database.begin() as connection:
        connection.execute(text(f"ALTER TABLE {line.store.schema.tasks.name} {column}"))
    calls: list[Callable[[], Any]] = [
        lambda: line.delays.schedule_delay("mail", {"card": CANARY}, 60),
        lambda: line.delays.schedule_many([("mail", {"card": CANARY}, 60)]),
    ]
    for call in calls:
        with pytest.raises(e.StoreError) as caught:
            call()
        assert CANARY not in str(caught.value)
        assert CANARY not in str(caught.value.__cause__)


def test_a_wrong_broker_password_is_not_told(
    connect: Connect, redis_url: str, postgresql_url: str
) -> None:
    line = connect(broker="rabbitmq")
    delays = line.connect(postgresql_url, f"amqp://canary:{CANARY}@127.0.0.1:5672//")
    delays.schedule_delay("mail", {}, 5)
    assert not wiring_of(delays).timer.is_up
    assert line.count("timer.down") + delays.events.counts["timer.down"] == 1
    assert CANARY not in repr(line.seen)
    delays.close()


def test_a_stuck_pool_of_connections_is_told(connect: Connect) -> None:
    line = connect(pool_size=1)
    engine = wiring_of(line.delays).store.database.auto
    engine.pool._timeout = 0.1  # type: ignore[attr-defined]
    held = [engine.connect() for _ in range(21)]
    with pytest.raises(e.StoreUnavailableError, match="pool_size = 1"):
        line.delays.get(1)
    for connection in held:
        connection.close()


# -- time -----------------------------------------------------------------------------------------


def test_a_question_for_the_time_that_is_cut_makes_no_task_early(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: time.time_ns() - 3600 * 10**9)
    # The clock of the host is one hour slow.
    monkeypatch.setattr(clock_module, "time", slow)
    line = connect()
    line.database.cut_request(b"clock_timestamp")
    task = line.delays.schedule_delay("mail", {}, 60)
    assert line.database.cut == 1
    assert 55 < (task.expected_time - line.store.tasks.now()).total_seconds() <= 60


def test_a_database_that_is_a_black_hole_holds_up_no_one_who_asks_for_the_time(
    connect: Connect,
) -> None:
    line = connect()
    line.warm_up()
    clock = wiring_of(line.delays).clock
    line.database.swallow()
    clock.forget()
    measuring = threading.Thread(target=clock.now_us, daemon=True)
    measuring.start()
    wait_until(clock._lock.locked, 5, "a thread to measure")
    before = wiring_of(line.delays).clock.now_us()
    assert seconds(lambda: [clock.certain_now() for _ in range(1000)]) < SLACK_S
    assert clock.now_us() > before
    line.database.heal()
    measuring.join(10)


# -- one queue ------------------------------------------------------------------------------------


def test_a_queue_of_another_kind_keeps_no_other_queue_from_its_messages(connect: Connect) -> None:
    line = connect(broker="rabbitmq")
    line.warm_up()
    before = line.arrived()
    mine = wiring_of(line.delays).publisher.queue("bad")
    with Celery(
        "other", broker=line._broker_url, set_as_current=False
    ).connection_for_write() as connection:
        other = Queue(mine.name, queue_arguments={"x-max-length": 7})(connection)
        other.queue_declare()
        try:
            line.delays.schedule_delay("mail", {}, 5, queue="bad")
            line.delays.schedule_delay("mail", {}, 5)
            wait_until(lambda: line.arrived() == before + 1, 5, "the other queue's message")
        finally:
            other.delete()
            mine.exchange(connection).delete()
    assert wiring_of(line.delays).timer.is_up
    assert line.count("queue.refused") == 1
    assert line.count("timer.down") == 0


# -- under a worker -------------------------------------------------------------------------------


class Site:
    """Run a deployment that reaches its broker through a proxy."""

    def __init__(self, folder: Path, database_url: str, broker_url: str, **settings: Any) -> None:
        self.broker = proxy_to(broker_url)
        self.deployment = Deployment(folder, database_url, self.broker.url(broker_url), **settings)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def new(database: str, broker: str, folder: Path = tmp_path, **settings: Any) -> Site:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        made.append(Site(folder, *urls, **settings))
        return made[-1]

    yield new
    for one in made:
        one.broker.heal()
        one.deployment.close()
        one.broker.close()


@DATABASES
def test_a_worker_whose_database_connections_are_killed_runs_all(
    site: Callable[..., Site], database: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{database}_url")
    d = site(database, "redis").deployment
    worker = d.worker()
    tasks = [d.schedule(delay=1 + n / 50) for n in range(200)]
    for part in range(1, 5):
        wait_until(lambda part=part: len(d.runs()) >= 40 * part, 20, f"{40 * part} runs")  # type: ignore[misc]
        kill_connections(url)
    d.wait_for(tasks, deadline_s=30)
    assert not worker.ended()
    assert {run[0] for run in d.runs()} == {str(task.id) for task in tasks}
    assert all(d.delays.get(task).attempts <= 5 for task in tasks)


@BROKERS
def test_a_worker_whose_broker_is_cut_again_and_again_resumes(
    site: Callable[..., Site], broker: str
) -> None:
    place = site("postgresql", broker)
    d = place.deployment
    worker = d.worker()
    for round in range(5):
        if round % 2:
            place.broker.refuse()
        else:
            place.broker.reset()
        # The broker is unreachable, or has just become reachable again.
        away = [d.schedule(delay=0.2) for _ in range(5)]
        place.broker.heal()
        d.wait_for(away, deadline_s=15)
        # The broker accepts messages again when a task runs on time without a sweep.
        wait_until(lambda: runs_on_time(d), 15, "a task on time", every_s=0.2)
    assert not worker.ended()
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs))


def runs_on_time(d: Deployment) -> bool:
    task = d.schedule(delay=0.3)
    d.wait_for([task])
    return next(int(run[1]) for run in d.runs() if run[0] == str(task.id)) < 100_000


@dataclass
class Outage:
    """Run a producer, a beat and a worker during one kind of outage of one broker."""

    name: str
    place: Site
    worker: Process
    tasks: list[DelayTask] = field(default_factory=list)
    healed_at: datetime = datetime.max

    def begin(self) -> None:
        wait_until(
            lambda: runs_on_time(self.place.deployment),
            15,
            f"a task on time, {self.name}",
            every_s=0.2,
        )
        if self.name.endswith("refused"):
            self.place.broker.refuse()
        else:
            self.place.broker.swallow()

    def schedule(self) -> None:
        took = seconds(lambda: self.tasks.append(self.place.deployment.schedule(delay=0.5)))
        assert took < LIMIT_S + SLACK_S, self.name

    def end(self) -> None:
        # A reset discards the swallowed bytes and their connections.
        self.place.broker.reset()
        self.place.broker.heal()
        self.healed_at = wiring_of(self.place.deployment.delays).clock.now()

    def longest_s(self) -> float:
        """Return the longest delay of a task, in seconds.

        The delay begins when the task is due and its broker is reachable again, and ends when it
        runs.
        """
        late_us = {run[0]: int(run[1]) for run in self.place.deployment.runs()}
        ran_at = {
            task: task.expected_time + timedelta(microseconds=late_us[str(task.id)])
            for task in self.tasks
        }
        return max(
            (at - max(task.expected_time, self.healed_at)).total_seconds()
            for task, at in ran_at.items()
        )


def test_what_was_scheduled_while_the_broker_was_away_for_long_runs_soon_after_it_is_back(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    """Run four outages simultaneously, since the test mostly waits.

    Each of two brokers refuses connections or swallows bytes.
    """
    outages = []
    for broker in ("redis", "rabbitmq"):
        for way in ("refused", "swallowed"):
            (folder := tmp_path / f"{broker}-{way}").mkdir()
            place = site("postgresql", broker, folder=folder, self_sweep_s=60)
            place.deployment.beat()
            outages.append(Outage(folder.name, place, place.deployment.worker(pool="threads")))
    for one in outages:
        one.begin()
    began = time.monotonic()
    while time.monotonic() < began + AWAY_S:
        for one in outages:
            one.schedule()
        time.sleep(1)
    for one in outages:
        one.end()
    for one in outages:
        d = one.place.deployment
        d.wait_for(one.tasks, deadline_s=30)
        r1_s = d.settings["grace_s"] + d.settings["sweep_s"] + 2
        assert one.longest_s() < RECONNECTS_S + r1_s + SLACK_S, one.name
        assert not one.worker.ended()
        runs = [run[0] for run in d.runs()]
        assert len(runs) == len(set(runs))


def test_a_worker_started_while_the_database_is_away_waits_for_it(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    database = proxy_to(postgresql_url)
    d = Deployment(tmp_path, database.url(postgresql_url), redis_url)
    try:
        task = d.schedule(delay=1)
        database.refuse()
        worker = d.worker()
        database.heal()
        d.wait_for([task], deadline_s=20)
        assert not worker.ended()
    finally:
        database.heal()
        d.close()
        database.close()
