"""The loops of the worker's main process, and the entries that the process holds."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks import StoreError, StoreUnavailableError
from delaytasks.core import loop as loop_module
from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop
from delaytasks.core.workers import RegisteredWorker, ServiceTimes, beat_age_s, broker_down_s
from delaytasks.worker import service_watch
from delaytasks.worker.chunk_queue import UnfinishedWork
from delaytasks.worker.service_watch import DatabaseContact, ServiceWatch
from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.waiting import wait_until
from tests.world import Entry, MainProcess, MakeWorld, WaitlistState, World
from tests.world.recording import ManualMonotonic


class AtWork(MainProcess):
    """A main process that has started, and whose loops a test can break."""

    def __init__(self, world: World) -> None:
        super().__init__(world, is_stepped=False)
        self.held_up = threading.Event()
        self.runtime.start()

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return self.world.told("loop.restarted")

    def loop(self, name: str) -> Loop:
        return next(loop for loop in self.runtime.watchdog.loops if loop.name == name)

    def break_loop(self, name: str, way: Callable[[], None]) -> None:
        """Make the next turn of the loop call `way` first."""
        loop = self.loop(name)
        turn = loop._turn

        def broken() -> float | None:
            loop._turn = turn
            way()
            return turn()

        loop._turn = broken
        loop.wake()
        wait_until(lambda: loop._turn is turn, 5, "the turn that breaks")

    def takes_turns(self, name: str) -> bool:
        loop, began = self.loop(name), monotonic()
        loop.wake()
        return wait_until(lambda: (loop._turned_at or 0) >= began, 5, f"a turn of {name}")

    def hang(self) -> None:
        assert self.held_up.wait(60)

    def close(self) -> None:
        self.held_up.set()
        super().close()


@pytest.fixture
def at_work(make_world: MakeWorld) -> Iterator[AtWork]:
    # A worker that serves no queue does not connect to Redis.
    at_work = AtWork(make_world(timer="redis://127.0.0.1:1/0"))
    yield at_work
    at_work.close()


@pytest.fixture
def main(world: World) -> Iterator[MainProcess]:
    main = MainProcess(world)
    yield main
    main.close()


def die() -> None:
    raise SystemExit


LOOPS = "statistics wheel leases sweep policies watch calls redis_poller redis_listener watchdog"


def test_a_worker_has_the_expected_loops(at_work: AtWork) -> None:
    info = at_work.runtime.info()["loops"]
    assert sorted(info) == sorted(LOOPS.split())
    assert all(loop["is_alive"] and loop["restarts"] == 0 for loop in info.values())


#: The longest time that each loop may be stuck, in seconds. A lease of a minute is renewed after 20
#: seconds, which leaves time for two more attempts.
BOUNDS = {"wheel": 2, "leases": 10, "sweep": 20, "watch": 30, "watchdog": 10}
BOUNDS |= {"redis_poller": 5, "redis_listener": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_a_stuck_loop_restarts(at_work: AtWork, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work.break_loop(name, at_work.hang)
    monkeypatch.setattr(loop_module, "monotonic", lambda: monotonic() + BOUNDS[name])
    # The watchdog and the watch loop check each other, so one that was late for a moment may be
    # replaced, too.
    replaced = {"loop": name, "reason": "stuck"}
    wait_until(lambda: replaced in at_work.restarts, 10, "it to be replaced")
    assert at_work.takes_turns(name)


def test_a_long_call_is_not_repeated(at_work: AtWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solo pool runs its processors in this loop."""
    at_work.break_loop("calls", at_work.hang)
    monkeypatch.setattr(loop_module, "monotonic", lambda: monotonic() + 100_000)
    at_work.runtime.watchdog.check()
    assert {"loop": "calls", "reason": "stuck"} not in at_work.restarts


def test_leases_are_renewed_while_the_watch_loop_waits(at_work: AtWork) -> None:
    at_work.break_loop("watch", at_work.hang)
    assert at_work.takes_turns("leases")


@pytest.mark.slow
def test_the_entries_of_the_timing_wheel_survive_its_thread(at_work: AtWork) -> None:
    runtime = at_work.runtime
    due_us = runtime.clock.now_us() + 3_000_000
    runtime.dispatcher.receive([Entry(id, 0, due_us) for id in (1, 2)])
    at_work.break_loop("wheel", die)
    assert len(runtime.near_entries.wheel) == 2
    came: list[Entry] = []
    runtime.wheel_thread._on_due = came.extend
    wait_until(lambda: len(came) == 2, 10, "the new thread to bring them out")
    assert runtime.clock.now_us() >= due_us
    assert runtime.events.counts["loop.restarted"] == 1


@pytest.mark.slow
def test_a_late_timing_wheel_is_reported(at_work: AtWork) -> None:
    runtime = at_work.runtime
    at_work.break_loop("wheel", at_work.hang)
    runtime.dispatcher.receive([Entry(1, 0, runtime.clock.now_us() + 1000)])
    wait_until(lambda: runtime.events.counts["wheel.late"], 10, "the alarm")
    wait_until(lambda: len(runtime.near_entries.wheel) == 0, 10, "a thread to bring the entry out")
    assert runtime.events.counts["loop.restarted"] == 1


def test_entries_that_become_due_while_a_worker_stops_are_sent_back(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, wheel = main.dispatcher.close, main.runtime.near_entries.wheel

    def close_in_its_time() -> UnfinishedWork:
        left = close()
        wait_until(lambda: len(wheel) == 0, 5, "the wheel to bring out what it still can")
        return left

    monkeypatch.setattr(main.dispatcher, "close", close_in_its_time)
    main.runtime.start()
    entry = Entry(1, 0, main.clock.now_us() + 500_000)
    main.dispatcher.receive([entry])
    main.runtime.stop()
    assert main.world.broker.armed == [entry]


def test_entries_that_a_stopped_worker_receives_are_sent_back(main: MainProcess) -> None:
    broker = main.world.broker
    main.runtime.start()
    main.runtime.stop()
    early, due = Entry(1, 0, main.clock.now_us() + 60_000_000), Entry(2, 0, main.clock.now_us())
    main.dispatcher.receive([early, due])
    main.drain("default", 5, 0)
    assert broker.armed == [early, due]
    # One message, since this worker may receive it again.
    assert broker.requested_drains == [("default", [0, 5], 1)]
    assert (len(main.runtime.near_entries.wheel), main.dispatcher.waiting) == (0, 0)
    main.runtime.stop()
    assert (len(broker.armed), len(broker.requested_drains)) == (2, 1)


def test_a_chunk_states_that_its_worker_has_not_read_the_policies_yet(main: MainProcess) -> None:
    """Without the policies, the chunks would run paused tasks."""
    main.world.delays.policies.pause(tag="note")
    main.take(1)
    main.world.runtime.policy_cache.refresh()
    main.take(1)
    first, second = (request.policies for request in main.requests)
    assert first is None
    assert second


def test_a_stopping_worker_requests_its_unfinished_drains_once(main: MainProcess) -> None:
    main.take(20)
    main.drain("default", 5, 0)
    main.pool.limit = 0  # no other chunk begins
    main.end(waitlists=(WaitlistState("mail", "note", 0),))
    for _ in range(2):
        main.runtime.stop()
    asked = [drain[:2] for drain in main.world.broker.requested_drains]
    assert asked == [("mail", []), ("default", [0, 5])]


def test_an_entry_far_beyond_the_horizon_is_not_held(main: MainProcess) -> None:
    now = main.clock.now_us()
    main.dispatcher.receive([Entry(1, 0, now + 20_000_000), Entry(2, 0, now + 10**13)])
    assert len(main.runtime.near_entries.wheel) == 1
    assert main.world.count("message.refused") == 1


@pytest.mark.slow
def test_a_sweep_whose_connections_became_silent_goes_on_with_new_ones(postgresql_url: str) -> None:
    proxy, prefix = proxy_to(postgresql_url), f"runtime{secrets.token_hex(4)}_"
    store = open_store(proxy.url(postgresql_url), table_prefix=prefix)
    world = World(store, sweep=1, _self_sweep_s=2)
    at_work, replaced = AtWork(world), [{"loop": "sweep", "reason": "stuck"}]
    try:
        wait_until(lambda: world.count("sweep.done"), 10, "the first sweep")
        proxy.strand()
        wait_until(lambda: at_work.restarts == replaced, 20, "it to be replaced")
        swept = world.count("sweep.done")
        wait_until(lambda: world.count("sweep.done") > swept, 20, "the next sweep")
        assert len(at_work.restarts) == 1, "no other connection of the old ones was used"
    finally:
        at_work.close()
        world.close()
        store.schema.metadata.drop_all(store.database.tx)
        store.close()
        proxy.close()


# -- for how long the broker, beat, the timer and the database are available -----------------------

# -- A worker measures for how long it has been without its broker, its timer and beat ------------


NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)


CLOCKED = [service_watch]


class Watch(ServiceWatch):
    """A watch whose timer is up, unless a check of a test says otherwise."""

    def __init__(self, time: ManualMonotonic, answers: Sequence[bool] = ()) -> None:
        self.time = time
        timer: Any = SimpleNamespace(is_up=not answers)
        left = iter(answers)
        super().__init__(timer, lambda: answers and setattr(timer, "is_up", next(left)))

    def after(self, seconds: float, reads_beat: bool = False) -> ServiceTimes:
        self.time.at += seconds
        return self.times(reads_beat=reads_beat)


@pytest.fixture
def watch(time: ManualMonotonic) -> Watch:
    return Watch(time)


def test_an_outage_of_the_broker_ends_with_the_next_connection(watch: Watch) -> None:
    watch.mark_broker_lost()
    watch.time.at += 7
    watch.mark_broker_lost()  # the next attempt to connect
    assert watch.after(1) == ServiceTimes(broker_down_s=8)
    watch.mark_broker_back()
    assert watch.after(0) == ServiceTimes()


def test_an_idle_timer_that_is_down_tries_its_server_at_each_report(time: ManualMonotonic) -> None:
    watch = Watch(time, [False, False, True])
    assert [watch.after(seconds).timer_down_s for seconds in (0, 5, 0)] == [0, 5, None]


def test_beat_is_as_old_as_its_last_message(watch: Watch) -> None:
    assert watch.after(60, reads_beat=True).beat_s == 60, "it has waited since its start"
    watch.mark_beat()
    assert watch.after(2, reads_beat=True).beat_s == 2
    assert watch.after(0).beat_s is None


def test_beat_is_not_late_because_the_broker_was_away(watch: Watch) -> None:
    watch.mark_broker_lost()
    watch.time.at += 60
    watch.mark_broker_back()
    assert watch.after(0, reads_beat=True).beat_s == 0
    watch.time.at += 5
    watch.mark_broker_back()  # it was not lost
    assert watch.after(0, reads_beat=True).beat_s == 5


def worker(is_alive: bool = True, up_s: float = 3600, **services: float) -> RegisteredWorker:
    times, began = ServiceTimes(**services), NOW - timedelta(seconds=up_s)
    of_pool = (["default"], None, "prefork", 2)
    return RegisteredWorker("w", is_alive, 0, *of_pool, began, NOW, 0.0, times)


def test_the_newest_message_of_beat_counts_among_the_workers_that_can_receive_one() -> None:
    assert beat_age_s([worker(beat_s=400), worker(beat_s=3), worker()]) == 3
    assert beat_age_s([worker(is_alive=False, beat_s=3), worker(beat_s=400)]) == 400
    assert beat_age_s([worker(broker_down_s=60, beat_s=60)]) is None
    assert beat_age_s([worker()]) is None


def test_the_broker_is_down_since_no_worker_has_reached_it() -> None:
    assert broker_down_s([]) is None
    assert broker_down_s([worker(broker_down_s=60), worker()]) is None
    assert broker_down_s([worker(broker_down_s=60), worker(is_alive=False)]) == 60
    alone = worker(broker_down_s=3000)  # the broker answered others for longer
    assert broker_down_s([alone, worker(broker_down_s=60)]) == 60


def test_a_worker_that_started_without_a_broker_does_not_know_since_when_it_is_down() -> None:
    restarted = worker(up_s=20, broker_down_s=20)
    assert broker_down_s([restarted, worker(broker_down_s=60)]) == 60
    assert broker_down_s([restarted, worker(up_s=40, broker_down_s=41)]) == 41


# -- A worker tracks outages of, and uninterrupted contact with, its databases --------------------


DOWN = StoreUnavailableError("connection refused")
REFUSALS = [StoreError("permission denied"), StoreUnavailableError("stayed busy", is_locked=True)]


@pytest.mark.parametrize("error", [*REFUSALS, DOWN])
def test_a_database_that_refuses_is_not_down(time: ManualMonotonic, error: StoreError) -> None:
    events, told = Events(), list[str]()
    events.subscribe(lambda name, fields: told.append(name))
    outages = service_watch.DatabaseOutages(events)
    cache = Mock(known=SimpleNamespace(stamp=None), cancel_requests=0)
    cache.refresh.side_effect = error
    runtime: Any = SimpleNamespace(policy_cache=cache, events=events, store=Mock(close=None))
    loop = service_watch.policy_loop(runtime, outages, Mock())
    for _ in range(3):
        with suppress(StoreError):
            loop._turn()
        time.at += service_watch.DATABASE_ANSWER_S + 1
        outages.check_answer()
    assert told == (["store.down"] if error is DOWN else [])


def test_a_contact_lasts_as_long_as_answers_have_no_gap(time: ManualMonotonic) -> None:
    contact = DatabaseContact(gap_s=8)
    assert contact.seconds == 0, "nobody has answered yet"
    for _ in range(4):
        contact.mark_answered()
        time.at += 5
    assert contact.seconds == 20


def test_a_gap_or_a_failure_restarts_the_contact(time: ManualMonotonic) -> None:
    contact = DatabaseContact(gap_s=8)
    contact.mark_answered()
    time.at += 5
    contact.mark_failed()
    assert contact.seconds == 0
    contact.mark_answered()
    time.at += 9
    assert contact.seconds == 0, "this process may have stood still"
    contact.mark_answered()
    time.at += 1
    assert contact.seconds == 1
