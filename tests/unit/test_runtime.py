"""The loops of the worker's main process, and the entries that the process holds."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from delaytasks.core import loop as loop_module
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Entry
from delaytasks.core.loop import Loop
from delaytasks.core.policies import WaitlistState
from delaytasks.worker.chunk_queue import UnfinishedWork
from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.waiting import wait_until
from tests.world import MainProcess, MakeWorld, World


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


LOOPS = [
    "statistics",
    "wheel",
    "leases",
    "sweep",
    "policies",
    "watch",
    "calls",
    "redis_poller",
    "redis_listener",
    "watchdog",
]


def test_a_worker_has_the_expected_loops(at_work: AtWork) -> None:
    info = at_work.runtime.info()["loops"]
    assert sorted(info) == sorted(LOOPS)
    assert all(loop["is_alive"] and loop["restarts"] == 0 for loop in info.values())


#: The longest time that each loop may be stuck, in seconds. A lease of a minute is renewed after 20
#: seconds, which leaves time for two more attempts.
BOUNDS = {
    "wheel": 2,
    "leases": 10,
    "sweep": 20,
    "watch": 30,
    "redis_poller": 5,
    "redis_listener": 5,
    "watchdog": 10,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_each_loop_that_is_stuck_is_replaced(
    at_work: AtWork, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work.break_loop(name, at_work.hang)
    monkeypatch.setattr(loop_module, "monotonic", lambda: monotonic() + BOUNDS[name])
    # The watchdog and the watch loop check each other, so one that was late for a moment may be
    # replaced, too.
    wait_until(
        lambda: {"loop": name, "reason": "stuck"} in at_work.restarts, 10, "it to be replaced"
    )
    assert at_work.takes_turns(name)


def test_a_call_that_takes_long_is_not_repeated(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    wait_until(
        lambda: len(runtime.near_entries.wheel) == 0, 10, "a fresh thread to bring the entry out"
    )
    assert runtime.events.counts["loop.restarted"] == 1


@pytest.mark.slow
def test_a_redis_poller_that_was_stuck_passes_on_none_of_its_entries(
    make_world: MakeWorld, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "runtime" + secrets.token_hex(4)
    world = make_world(timer=redis_url, namespace=name, _grace_s=60)
    timer = world.runtime.redis_timer
    came, stuck = list[Any](), list[threading.Thread]()
    take = timer.take

    def take_once_and_hang(*arguments: Any) -> Any:
        taken = take(*arguments)
        if not stuck and any(some.entries for some in taken or ()):
            stuck.append(threading.current_thread())
            worker.hang()
        return taken

    timer.take = take_once_and_hang
    worker = AtWork(world)
    worker.dispatcher.receive = came.extend  # type: ignore[assignment, method-assign]
    try:
        timer.arm([Entry(1, 0, worker.clock.now_us())])
        wait_until(lambda: stuck, 10, "the poller to take the entry")
        monkeypatch.setattr(loop_module, "monotonic", lambda: monotonic() + BOUNDS["redis_poller"])
        wait_until(lambda: came, 15, "another thread to bring it")
        worker.held_up.set()
        stuck[0].join(10)
        assert not stuck[0].is_alive()
        assert [entry.id for entry in came] == [1]
    finally:
        worker.close()
        with redis.Redis.from_url(redis_url) as client:
            for key in client.scan_iter(f"*{name}*", count=1000):
                client.delete(key)


def test_entries_that_become_due_while_a_worker_stops_are_sent_back(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = main.dispatcher.close

    def close_in_its_time() -> UnfinishedWork:
        left = close()
        wait_until(
            lambda: len(main.runtime.near_entries.wheel) == 0,
            5,
            "the wheel to bring out what it holds, if it still can",
        )
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
    assert broker.requested_drains == [("default", [0, 5], 1)], (
        "one message, since this worker may receive it again"
    )
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


def test_a_stopping_worker_requests_its_unfinished_drains_from_others_once(
    main: MainProcess,
) -> None:
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
def test_a_sweep_whose_connections_became_silent_continues_with_new_ones(
    postgresql_url: str,
) -> None:
    proxy, prefix = proxy_to(postgresql_url), f"runtime{secrets.token_hex(4)}_"
    store = open_store(proxy.url(postgresql_url), table_prefix=prefix)
    world = World(store, sweep=1, _self_sweep_s=2)
    at_work = AtWork(world)
    try:
        wait_until(lambda: world.count("sweep.done"), 10, "the first sweep")
        proxy.strand()
        wait_until(
            lambda: at_work.restarts == [{"loop": "sweep", "reason": "stuck"}],
            20,
            "it to be replaced",
        )
        swept = world.count("sweep.done")
        wait_until(lambda: world.count("sweep.done") > swept, 20, "the next sweep")
        assert len(at_work.restarts) == 1, "no other connection of the old ones was used"
    finally:
        at_work.close()
        world.close()
        store.schema.metadata.drop_all(store.database.tx)
        store.close()
        proxy.close()
