"""Callers whose database interrupts connections or is unreachable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import delaytasks as e
from delaytasks import DelayTasks, NewTask
from delaytasks.model import clock as clock_module
from delaytasks.runtime import runtime_of
from tests.integration.outages.conftest import DATABASES, SLACK_S, Connect, ProxiedCaller, seconds
from tests.proxy import Proxy
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

INSERT, COMMIT = rb"INSERT INTO|EXECUTE ", rb"COMMIT(?!TED)"


NEW = NewTask("mail", {"n": 1}, 60)
#: The number of rows that each call makes.
CASES: dict[str, tuple[int, Callable[[DelayTasks], Any]]] = {
    "plain": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60)),
    "keyed": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="k")),
    "kept": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="k", on_conflict="keep")),
    "own id": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, id=4711)),
    "many": (20, lambda d: d.schedule_many([NEW] * 20)),
    "lot": (3, lambda d: d.schedule_many([NEW, NEW, NEW._replace(key="k")])),
}
MOMENTS = pytest.mark.parametrize("moment", ["request", "answer"])


def cut(caller: ProxiedCaller, moment: str, words: bytes) -> None:
    """Cut the connection at the next request with these words, or at its answer."""
    proxy = caller.database
    (proxy.cut_answer if "answer" in moment else proxy.cut_request)(words)


@pytest.fixture
def caller(connect: Connect, database: str) -> ProxiedCaller:
    made = connect(database)
    made.warm_up()
    return made


def unknown() -> Any:
    return pytest.raises(e.OutcomeUnknownError, match="scheduling again with id=")


@DATABASES
@pytest.mark.parametrize("moment", ["request", "answer", "commit", "commit answer"])
@pytest.mark.parametrize("name", CASES)
def test_a_connection_cut_while_scheduling_makes_no_second_row(
    caller: ProxiedCaller, database: str, moment: str, name: str
) -> None:
    before, (rows, schedule) = caller.rows(), CASES[name]
    is_copied = database == "postgresql" and name in ("many", "lot")
    cut(caller, moment, COMMIT if "commit" in moment else rb"COPY " if is_copied else INSERT)
    schedule(caller.delays)
    autocommitted = name in ("plain", "own id")
    assert caller.database.cut == (0 if autocommitted and "commit" in moment else 1)
    caller.database.heal()
    assert caller.rows() == before + rows
    found = [task.body for task in caller.delays.find(limit=100) if task.delay_s == 60]
    assert len(found) == rows


@DATABASES
@MOMENTS
@pytest.mark.parametrize("key", [None, "k"])
def test_an_unknown_outcome_names_the_id_and_scheduling_again_with_it_is_safe(
    caller: ProxiedCaller, moment: str, key: str | None
) -> None:
    before = caller.rows()
    cut(caller, moment, INSERT if key is None else COMMIT)
    watch_and_refuse(caller.database)
    with unknown() as caught:
        caller.delays.schedule_delay("mail", {"n": 1}, 5, key=key)
    id = caught.value.id
    assert id is not None
    caller.database.heal()
    messages = caller.arrived()
    assert caller.rows() == before + (moment == "answer")
    for _ in range(2):
        task = caller.delays.schedule_delay("mail", {"n": 1}, 5, key=key, id=id)
        assert task.id == id
    assert caller.rows() == before + 1
    wait_until(lambda: caller.arrived() > messages, 5, "the row to be armed")


@DATABASES
@MOMENTS
def test_if_the_outcome_of_a_batch_is_unknown_all_or_none_of_its_tasks_exist(
    caller: ProxiedCaller, moment: str
) -> None:
    before, batch = caller.rows(), [NEW._replace(id=4711), NEW._replace(id=4712)]
    cut(caller, moment, COMMIT)
    watch_and_refuse(caller.database)
    with unknown() as caught:
        caller.delays.schedule_many(batch)
    assert caught.value.id in (4711, 4712)
    caller.database.heal()
    assert caller.rows() == before + (2 if moment == "answer" else 0)
    caller.delays.schedule_many(batch)
    assert caller.rows() == before + 2


@DATABASES
@MOMENTS
def test_an_autocommit_statement_on_the_callers_connection_has_an_unknown_outcome(
    caller: ProxiedCaller, moment: str
) -> None:
    before = caller.rows()

    def schedule(connection: Any, id: int | None = None) -> Any:
        return caller.delays.schedule_delay("mail", {}, 60, id=id, session=connection)

    url = runtime_of(caller.delays).store.database.url
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        cut(caller, moment, INSERT)
        with unknown() as caught:
            schedule(connection)
        assert connection.invalidated, "the pool must not give it to anybody"
    with engine.connect() as connection:
        assert schedule(connection, caught.value.id).id == caught.value.id
    assert caller.rows() == before + 1
    engine.dispose()


def watch_and_refuse(proxy: Proxy) -> None:
    """Make the database unreachable when a connection is cut."""

    def watch() -> None:
        wait_until(lambda: proxy.cut, 10, "the cut", every_s=0.0005)
        proxy.refuse()

    threading.Thread(target=watch, daemon=True).start()


@DATABASES
def test_a_database_lost_between_calls_is_unavailable_not_unknown(caller: ProxiedCaller) -> None:
    caller.database.refuse()
    for key in (None, "k"):
        with pytest.raises(e.StoreUnavailableError, match="cannot be reached"):
            caller.delays.schedule_delay("mail", {}, 60, key=key)


CANARY = "s3cr3t-canary"


@DATABASES
@pytest.mark.parametrize(("outage", "limit_s"), [("refuse", 4), ("swallow", 7)])
def test_an_unavailable_database_is_reported_soon_and_without_secrets(
    connect: Connect, database: str, outage: str, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caller = connect(database)
    url = caller.store.database.url.set(username="x", password=CANARY)
    place = url.render_as_string(hide_password=False)
    caller.conf["broker_url"] = f"redis://:{CANARY}@127.0.0.1/9"
    delays, seen = caller.producer(place), list[Any]()
    delays.events.subscribe(lambda *event: seen.append(event))
    getattr(caller.database, outage)()
    calls: list[Callable[[], Any]] = [lambda: delays.schedule_delay("mail", {"card": CANARY}, 60)]
    # Each call of the other outage waits until its limit, so only this outage tests all calls.
    if outage == "refuse":
        calls += [
            lambda: delays.get(1),
            lambda: delays.schedule_many([("mail", {"card": CANARY}, 60)]),
            lambda: delays.schedule_delay("mail", {"card": CANARY}, 60, key="k"),
            lambda: delays.cancel(1),
            lambda: delays.find(),
        ]
    refused = "the database cannot be reached"
    with caplog.at_level(logging.DEBUG):
        for call in calls:
            began = time.monotonic()
            with pytest.raises(e.StoreUnavailableError, match=refused) as caught:
                call()
            assert time.monotonic() - began < limit_s
            assert CANARY not in texts_of_causes(caught.value)
    assert CANARY not in caplog.text
    assert CANARY not in repr(seen)


def texts_of_causes(error: BaseException | None) -> str:
    words = ""
    while error is not None:
        words += f"{error!s} {error!r} "
        error = error.__cause__ or error.__context__
    return words


# -- time ----------------------------------------------------------------------------------------


def test_an_interrupted_time_measurement_makes_no_task_early(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock of the host is one hour slow.
    an_hour_ago = {"time_ns": lambda: time.time_ns() - 3600 * 10**9}
    slow = SimpleNamespace(**{**vars(time), **an_hour_ago})
    monkeypatch.setattr(clock_module, "time", slow)
    caller = connect()
    caller.database.cut_request(b"clock_timestamp")
    task = caller.delays.schedule_delay("mail", {}, 60)
    assert caller.database.cut == 1
    assert 55 < (task.expected_time - caller.store.tasks.now()).total_seconds() <= 60


def test_a_silent_database_delays_no_thread_that_reads_the_clock(connect: Connect) -> None:
    caller = connect()
    caller.warm_up()
    clock = runtime_of(caller.delays).clock
    caller.database.swallow()
    clock.forget()
    measuring = threading.Thread(target=clock.now_us, daemon=True)
    measuring.start()
    wait_until(clock._lock.locked, 5, "a thread to measure")
    before = runtime_of(caller.delays).clock.now_us()
    assert seconds(lambda: [clock.certain_now() for _ in range(1000)]) < SLACK_S
    assert clock.now_us() > before
    caller.database.heal()
    measuring.join(10)
