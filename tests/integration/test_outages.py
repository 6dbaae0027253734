"""Callers and workers whose broker or database is away, hangs, is far away or cuts connections.

Callers wait within the limits, no task is lost, and no task runs twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, NewTask, Status
from delaytasks.broker.link import CONNECT_STEP_S
from delaytasks.model import clock as clock_module
from delaytasks.runtime import runtime_of
from tests.conformance.test_timers import messages
from tests.conformance.test_waitlists import waitlist_rows
from tests.conftest import new_world
from tests.integration.conftest import Deploy
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment, quick
from tests.services import PostgresServer
from tests.waiting import SLACK_S as BUSY_S
from tests.waiting import in_child, wait_until, within
from tests.world import World

pytestmark = pytest.mark.slow

LIMIT_S = 0.5
#: A busy machine adds up to this many seconds to a call.
SLACK_S = 0.4


class ProxiedCaller(Deployment):
    """A deployment whose producer reaches the database and the broker through proxies."""

    @property
    def database(self) -> Proxy:
        return self.proxies["database"]

    @property
    def broker(self) -> Proxy:
        return self.proxies["broker"]

    def warm_up(self) -> None:
        """Open all connections before the test."""
        self.delays.schedule_delay("mail", {}, 5)
        self.delays.schedule_delay("mail", {}, 3600, key="warm")
        wait_until(lambda: self.queued() == 1, 5, "the first message")

    def arms(self) -> bool:
        """Schedule a task, and return whether the timer is up."""
        self.delays.schedule_delay("mail", {}, 5)
        return self.timer_is_up

    def rows(self) -> int:
        return sum(self.counted().values())

    def count(self, event: str) -> int:
        return self.delays.events.counts[event]

    def close(self) -> None:
        runtime_of(self.delays).store.database.dispose()  # connections may be broken
        super().close()


Connect = Callable[..., ProxiedCaller]


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


BROKERS = pytest.mark.parametrize("broker", ["redis", "rabbitmq"])


@pytest.fixture
def connect(deploy: Deploy) -> Connect:
    """Make callers that arm in their own thread, unless a setting says something else."""
    places: Any = {"kind": ProxiedCaller, "proxied": ["database", "broker"], "arm": "inline"}

    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> ProxiedCaller:
        made: ProxiedCaller = deploy(database, broker, **{**places, **settings})
        return made

    return new


# -- callers without their broker ------------------------------------------------------------------


#: Connecting in a background thread may take this many seconds.
CONNECTS_S = 2 * CONNECT_STEP_S + SLACK_S
#: The proxy delays each direction by this many seconds, so a round trip takes 0.1 s.
DELAY_S = 0.05
#: This is longer than the dozen round trips of a new connection.
CONNECTED_S = 10
THREADS, MANY = 16, 80


@BROKERS
@pytest.mark.parametrize("outage", [quick("refuse"), "swallow"])
def test_scheduling_continues_without_the_broker(
    connect: Connect, broker: str, outage: str
) -> None:
    caller = connect(broker=broker)
    delays = caller.delays
    delays.schedule_delay("mail", {}, 3600)  # opens a connection to the database only
    for outages in (1, 2):  # the second one cuts a connection to the broker that is open
        before = caller.rows()
        getattr(caller.broker, outage)()
        assert seconds(lambda: delays.schedule_delay("mail", {}, 5)) < LIMIT_S + SLACK_S
        assert caller.rows() == before + 1
        if (broker, outage, outages) == ("rabbitmq", "swallow", 2):
            # AMQP does not confirm the publication. The message is lost, and the sweep finds the
            # overdue row.
            return
        assert not caller.timer_is_up

        # While one thread connects, and during the pause after an attempt, other callers do not
        # wait, and no further event reports the outage.
        assert seconds(lambda: [delays.schedule_delay("mail", {}, 5) for _ in range(5)]) < LIMIT_S
        wait_until(lambda n=outages: caller.count("timer.down") == n, CONNECTS_S, "a report")  # type: ignore[misc]
        assert not caller.timer_is_up
        assert caller.rows() == before + 6
        assert caller.count("timer.down") == outages

        caller.broker.heal()
        already = caller.queued()
        wait_until(caller.arms, 5, "the timer to be up again", every_s=0.1)
        assert caller.count("timer.up") == outages
        wait_until(lambda n=already: caller.queued() > n, 5, "a message to arrive")  # type: ignore[misc]

    caller.broker.reset()
    if broker == "rabbitmq":  # the first write to a connection that was just closed does not fail
        delays.schedule_delay("mail", {}, 5)
    already = caller.queued()
    delays.schedule_delay("mail", {}, 5)
    wait_until(lambda: caller.queued() == already + 1, 5, "the message, on a new connection")
    assert caller.count("timer.down") == 2


def backend(engine: Engine) -> int:
    """Return the id of the server process of a pooled connection."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


@pytest.mark.parametrize(("broker", "timer"), [("rabbitmq", "eta"), ("redis", "redis")])
def test_a_forked_child_has_its_own_connections(connect: Connect, broker: str, timer: str) -> None:
    caller = connect(broker=broker, timer=timer)
    assert caller.arms()
    accepted, database = caller.broker.accepted, runtime_of(caller.delays).store.database
    sessions = {backend(database.auto), backend(database.tx)}

    def schedule() -> None:
        assert all(caller.arms() for _ in range(50))

    def work() -> None:
        assert not sessions & {backend(database.auto), backend(database.tx)}
        schedule()
        caller.delays.close()

    assert in_child(work, meanwhile=schedule)
    assert caller.broker.accepted > accepted
    assert backend(database.auto) in sessions, "the child closed what is its parent's"
    assert caller.arms(), "the parent's connections still work"
    armed = [id for ids in messages(caller) + caller.timer_slots() for id in ids]
    assert sorted(armed) == sorted(task.id for task in caller.delays.find(limit=1000))
    assert len(armed) == 102


def test_many_threads_reach_a_distant_broker_without_and_with_a_connection(
    connect: Connect,
) -> None:
    caller = connect(broker="rabbitmq", pool_size=THREADS)
    caller.delays.schedule_delay("mail", {}, 3600)
    arrived = list[int]()

    def have_arrived(number: int) -> bool:
        arrived.extend(id for ids in messages(caller) for id in ids)
        return len(arrived) == number

    for number in (MANY, 2 * MANY):  # the first ones connect
        caller.broker.delay_s = DELAY_S
        with ThreadPoolExecutor(THREADS) as pool:
            assert max(pool.map(lambda _: seconds(caller.arms), range(MANY))) < LIMIT_S + SLACK_S
        assert number > MANY or caller.broker.accepted == 1
        caller.broker.delay_s = 0  # for the test, which reads the messages one by one
        wait_until(lambda n=number: have_arrived(n), CONNECTED_S, "all messages")  # type: ignore[misc]
    assert caller.count("timer.down") == 0


# -- workers ---------------------------------------------------------------------------------------


#: This outage is longer than a worker's pauses between two attempts to connect.
AWAY_S = 13
#: The sum of a worker's longest pause and the longest attempt to connect.
RECONNECTS_S = 4 + 4
#: A worker notices that its broker hangs after the next heartbeat, the time limit of that
#: heartbeat, and the time in which Celery closes the connection. Starting takes as long.
NOTICES_S = 2 + 5 + 5
OUTAGES = [
    ("redis", "refuse", "prefork"), ("redis", "swallow", "threads"),
    ("rabbitmq", "refuse", "threads"), ("rabbitmq", "swallow", "prefork"),
]  # fmt: skip


class Outage:
    """A producer and a worker during one kind of outage of one broker."""

    def __init__(self, start: Deploy, broker: str, way: str, pool: str) -> None:
        self.name, self.way = f"{broker}-{way}", way
        self.d = start("postgresql", broker, folder=self.name, proxied=["broker"])
        self.proxy = self.d.proxies["broker"]
        self.tasks: list[DelayedTask] = []
        self.begin()
        self.worker = self.d.begin_worker(pool=pool)

    def begin(self) -> None:
        getattr(self.proxy, self.way)()

    def schedule(self) -> None:
        took = seconds(lambda: self.tasks.append(self.d.schedule(delay=0.5)))
        assert took < LIMIT_S + SLACK_S, self.name

    def work_from_the_table(self) -> None:
        self.d.wait_for(self.tasks, deadline_s=NOTICES_S + self.d.r1_s() + BUSY_S)
        assert not self.worker.ended(), self.name

    def end(self) -> None:
        # A reset discards the swallowed bytes and their connections.
        self.proxy.reset()
        self.proxy.heal()

    def be_on_time(self) -> None:
        limit_s = RECONNECTS_S + self.d.r1_s() + BUSY_S
        wait_until(self.d.runs_on_time, limit_s, f"a task on time, {self.name}", every_s=0.2)


def test_workers_start_and_work_without_their_broker_and_reconnect(deploy: Deploy) -> None:
    """Four outages take place simultaneously, since the test mostly waits."""
    outages = [Outage(deploy, *one) for one in OUTAGES]
    for away_s in (0, AWAY_S):
        until = time.monotonic() + away_s
        for one in outages:
            one.begin()
        while True:
            for one in outages:
                one.schedule()
            if time.monotonic() > until:
                break
            time.sleep(1)
        for one in outages:
            one.work_from_the_table()
            [row] = one.d.store.workers.registered(one.d.store.tasks.now(), 60)
            if away_s and one.way == "refuse":
                assert row.services.broker_down_s, "its row shows the outage"
            one.end()
        for one in outages:
            one.worker.wait_for(" ready.", 30)
            one.be_on_time()
    for one in outages:
        runs = [run[0] for run in one.d.runs()]
        assert len(runs) == len(set(runs)), one.name
        one.worker.terminate()
        assert one.worker.status == 0


def test_a_worker_started_while_the_database_is_away_waits_for_it(deploy: Deploy) -> None:
    d = deploy(proxied=["database"])
    task = d.schedule(delay=1)
    d.proxies["database"].refuse()
    worker = d.worker()
    d.proxies["database"].heal()
    d.wait_for([task], deadline_s=20)
    assert not worker.ended()


@BROKERS
def test_a_worker_receives_several_tasks_in_a_round_trip_to_a_distant_broker(
    deploy: Deploy, proxies: list[Proxy], broker: str
) -> None:
    """With one task in each round trip of 0.1 s, a hundred tasks would take ten seconds.

    With `arm="inline"`, each task has a message of its own.
    """
    # Only messages can start tasks within the time of this test.
    d = deploy("postgresql", broker, arm="inline", _self_sweep_s=600, _grace_s=60)
    proxies.append(proxy := proxy_to(d.conf["broker_url"]))
    proxy.delay_s = 0.05
    d.conf["broker_url"] = proxy.url(d.conf["broker_url"])
    worker = d.worker(concurrency=1)
    ids = {str(d.schedule().id) for _ in range(100)}
    wait_until(lambda: {run[0] for run in d.runs()} == ids, 7, worker.log)
    worker.terminate()
    assert "Traceback" not in worker.log()


# -- callers without their database ----------------------------------------------------------------


INSERT, COMMIT = rb"INSERT INTO|EXECUTE ", rb"COMMIT(?!TED)"
NEW = NewTask("mail", {"n": 1}, 60)
#: The number of rows that each call makes.
CASES: dict[str, tuple[int, Callable[[DelayTasks], Any]]] = {
    "plain": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60)),
    "keyed": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="a")),
    "kept": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, key="b", on_conflict="keep")),
    "own id": (1, lambda d: d.schedule_delay("mail", {"n": 1}, 60, id=4711)),
    "many": (20, lambda d: d.schedule_many([NEW] * 20)),
    "lot": (3, lambda d: d.schedule_many([NEW, NEW, NEW._replace(key="c")])),
}
#: The statement whose connection is cut, and calls whose outcome is unknown then.
UNKNOWN: dict[str, tuple[bytes, int, Callable[[DelayTasks, Any], Any]]] = {
    "plain": (INSERT, 1, lambda d, id: d.schedule_delay("mail", {}, 5, id=id)),
    "keyed": (COMMIT, 1, lambda d, id: d.schedule_delay("mail", {}, 5, key="k", id=id)),
    "many": (
        COMMIT, 2,
        lambda d, id: d.schedule_many([NewTask("mail", {}, 5, id=1), NewTask("mail", {}, 5, id=2)]),
    ),
}  # fmt: skip


def cut(caller: ProxiedCaller, moment: str, words: bytes) -> None:
    """Cut the connection at the next request with these words, or at its answer."""
    proxy = caller.database
    (proxy.cut_answer if "answer" in moment else proxy.cut_request)(words)


def watch_and_refuse(proxy: Proxy, cuts: int) -> None:
    """Make the database unreachable when a connection is cut."""

    def watch() -> None:
        wait_until(lambda: proxy.cut == cuts, 10, "the cut", every_s=0.0005)
        proxy.refuse()

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(params=["postgresql", "mysql"])
def caller(request: pytest.FixtureRequest, connect: Connect) -> ProxiedCaller:
    made = connect(request.param)
    made.warm_up()
    return made


def unknown() -> Any:
    return pytest.raises(e.OutcomeUnknownError, match="scheduling again with id=")


@pytest.mark.parametrize("moment", ["request", "answer", "commit", "commit answer"])
def test_a_connection_cut_while_scheduling_makes_no_second_row(
    caller: ProxiedCaller, moment: str
) -> None:
    is_postgresql = caller.store.database.backend == "postgresql"
    for name, (rows, schedule) in CASES.items():
        before, cuts = caller.rows(), caller.database.cut
        is_copied = is_postgresql and name in ("many", "lot")
        cut(caller, moment, COMMIT if "commit" in moment else rb"COPY " if is_copied else INSERT)
        schedule(caller.delays)
        is_cut = "commit" not in moment or name not in ("plain", "own id")  # they have no COMMIT
        assert caller.database.cut == cuts + is_cut, name
        caller.database.heal()
        assert caller.rows() == before + rows, name
    found = [task for task in caller.delays.find(limit=100) if task.delay_s == 60]
    assert len(found) == sum(rows for rows, _ in CASES.values())


@pytest.mark.parametrize("moment", ["request", "answer"])
def test_an_unknown_outcome_names_the_id_and_scheduling_again_with_it_is_safe(
    caller: ProxiedCaller, moment: str
) -> None:
    for number, (words, rows, schedule) in enumerate(UNKNOWN.values(), 1):
        # It opens a connection for transactions, which takes a COMMIT too.
        caller.delays.schedule_delay("mail", {}, 3600, key=f"warm {number}")
        before = caller.rows()
        cut(caller, moment, words)
        watch_and_refuse(caller.database, number)
        with unknown() as caught:
            schedule(caller.delays, None)
        assert caught.value.id is not None
        caller.database.heal()
        messages = caller.queued()
        assert caller.rows() == before + (rows if moment == "answer" else 0), "all or none"
        for _ in range(2):
            schedule(caller.delays, caught.value.id)
        assert caller.rows() == before + rows
        is_armed = lambda n=messages: caller.queued() > n  # noqa: E731
        assert rows > 1 or wait_until(is_armed, 5, "the row to be armed")


@pytest.mark.parametrize("moment", ["request", "answer"])
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


CANARY = "s3cr3t-canary"
CALLS: list[Callable[[DelayTasks], Any]] = [
    lambda d: d.schedule_delay("mail", {"card": CANARY}, 60),
    lambda d: d.schedule_delay("mail", {"card": CANARY}, 60, key="k"),
    lambda d: d.schedule_many([("mail", {"card": CANARY}, 60)]),
    lambda d: d.get(1),
    lambda d: d.cancel(1),
    lambda d: d.find(),
]


@pytest.mark.parametrize(("outage", "limit_s"), [("refuse", 4), ("swallow", 7)])
def test_an_unavailable_database_is_reported_soon_and_without_secrets(
    caller: ProxiedCaller, outage: str, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    url = caller.store.database.url.set(username="x", password=CANARY)
    caller.conf["broker_url"] = f"redis://:{CANARY}@127.0.0.1/9"
    strange, seen = caller.producer(url.render_as_string(hide_password=False)), list[Any]()
    strange.events.subscribe(lambda *event: seen.append(event))
    getattr(caller.database, outage)()
    # Each call of the other outage waits until its limit, so only this outage tests all calls, and
    # those of a producer that has lost its connections.
    is_quick = outage == "refuse"
    producers = [strange, caller.delays] if is_quick else [strange]
    with caplog.at_level(logging.DEBUG):
        for delays in producers:
            for call in CALLS if is_quick else CALLS[:1]:
                with pytest.raises(e.StoreUnavailableError, match="cannot be reached") as caught:
                    within(limit_s, partial(call, delays))
                assert CANARY not in texts_of_causes(caught.value)
    assert CANARY not in caplog.text
    assert CANARY not in repr(seen)


def texts_of_causes(error: BaseException | None) -> str:
    words = ""
    while error is not None:
        words += f"{error!s} {error!r} "
        error = error.__cause__ or error.__context__
    return words


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
    assert seconds(lambda: (clock.now_us(), clock.certain_now())) < SLACK_S
    caller.database.heal()
    measuring.join(10)


# -- Claims that a crash of PostgreSQL has lost, because they do not wait for the disk ------------


@pytest.mark.quick
def test_a_settlement_is_on_the_disk_and_the_run_of_a_lost_claim_cannot_settle_the_next(
    own_postgresql: PostgresServer,
) -> None:
    # Asynchronous commits are on the disk after ten seconds.
    own_postgresql.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    own_postgresql.execute("SELECT pg_reload_conf()")
    with new_world(World, own_postgresql.url) as world:
        settled, made = world.put(), world.put()
        [ended] = world.claim(settled)
        assert world.settle(ended, "fail", error="refused")
        [lost] = world.claim(made)
        own_postgresql.restart()
        failed, found = world.read(settled), world.read(made)
        assert (failed.status, failed.runs, failed.error) == (Status.FAILED, 1, "refused")
        assert (found.status, found.version) == (Status.NOT_COMPLETE, made.version)
        [again] = world.claim(made, by="worker-2")
        assert not world.settle(lost)
        assert world.settle(again, by="worker-2")

        world.limit(concurrency=1)
        tasks = [world.schedule(body=number) for number in range(2)]
        assert len(world.claim(*tasks)) == 1
        own_postgresql.restart()
        assert sorted(world.statuses(tasks)) == ["HELD", "RUNNING"], "with a limit it waits"
        assert waitlist_rows(world) == 1
