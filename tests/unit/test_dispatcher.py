"""Chunks, drains and the pool of a dispatcher, beyond what tests/reliability/test_dispatching.py
finds by simulation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pytest
from celery.concurrency import solo

from delaytasks.limits import tracked_waitlists
from delaytasks.model.policies import WAITLIST_RECHECK_S
from tests.waiting import wait_until
from tests.world import Entry, FailureReason, MainProcess, MakeWorld, Report, WaitlistState, World
from tests.world.recording import ManualClock, ManualTime

MakeMain = Callable[[int], "Main"]
AWAY = FailureReason.UNAVAILABLE
#: How much longer late entries wait if their queue has a backlog, how long a process continues with
#: a backlog, also in turn with another one, and when a slow chunk gets another one beside it.
BACKLOG_WAIT_S, CONTINUE_S, CONTINUE_IN_TURN_S, HELD_UP_S = 10.0, 2.0, 0.5, 0.26


class Main(MainProcess):
    """A main process whose clocks stand still until a test sets them."""

    def __init__(self, world: World, processes: int, time: ManualTime) -> None:
        world.set_clock(ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc)))
        super().__init__(world, processes)
        self.time, self.broker = time, world.broker

    def pump_later(self, seconds: float) -> None:
        """Pump only if the dispatcher has planned to look by then."""
        self.time.at += seconds
        self.look()

    def late(self) -> int:
        """Return how many entries were left to the table."""
        return self.world.count("entry.late")

    def learn(self, row_s: float) -> None:
        """Learn how long a row takes."""
        self.take(10)
        for _ in range(2):
            self.end(5, row_s)

    def asked(self) -> list[tuple[str, list[int]]]:
        """Return the drains that other workers were asked for since the last call."""
        return [request[:2] for request in self.broker.take_requested_drains()]


@pytest.fixture
def make_main(make_world: MakeWorld, time: ManualTime) -> MakeMain:
    return lambda processes: Main(make_world(_chunk_time_budget_s=0.05), processes, time)


@pytest.fixture
def main(make_main: MakeMain) -> Main:
    return make_main(2)


@pytest.fixture
def draining(main: Main) -> Main:
    """A main process whose two processes drain the backlog of a queue."""
    main.drain()
    assert main.continue_s() == [0]
    main.end(is_full=True)
    return main


# -- the entries of a chunk -----------------------------------------------------------------------


def test_chunks_have_the_number_of_rows_that_fits_the_time_budget(main: Main) -> None:
    main.take(1000)
    assert main.sizes() == [10, 10], "no more chunks than processes"
    assert main.waiting == 980
    main.end(10, 0.0001)
    assert main.sizes() == [10, 200], "a tenth of a millisecond each: as many as a chunk may have"
    main.end(10, 0.050)
    main.end(200, 0.050)
    assert main.sizes()[-1] < 5, "50 ms each: hardly more than one"


def test_rows_of_one_batch_stay_together_even_beyond_the_time_budget(main: Main) -> None:
    main.take(10)
    assert main.sizes() == [5, 5], "the entries are shared among the free processes"
    for _ in range(2):
        main.end(5, 0.001, wanted=40)
    main.take(60, start=100)
    assert main.sizes() == [40, 20], "and not 30 for each"
    main.end(40, 0.001)
    main.end(20, 0.001)
    main.take(60, start=200)
    assert main.sizes() == [30, 30], "others came meanwhile, who are shared"
    for _ in range(2):
        main.end(30, 0.2, wanted=20)
    main.take(100, start=300)
    assert main.sizes() == [20, 20]


def test_the_capacity_is_a_chunk_and_the_next_one_of_each_process(main: Main) -> None:
    assert main.capacity() == 40, "two processes, of which nothing is known yet"
    main.take(20)
    main.end(10, 0.005)
    main.end(10, 0.005)
    assert (main.capacity(), main.capacity(coming=15)) == (40, 25), "ten rows in each budget"
    main.take(15, start=50)
    assert main.capacity() == 20, "both work, and nothing waits"
    main.take(5, start=100)
    assert main.capacity() == 15
    main.take(6, start=200)
    assert main.capacity() == 0, "not worth the way"
    main.stop()
    assert main.capacity() == 0


def test_late_entries_wait_longer_if_their_queue_has_a_backlog(draining: Main) -> None:
    main = draining
    grace_s = main.world.delays.settings.grace_s
    main.take(5)
    main.clock.advance(grace_s + BACKLOG_WAIT_S - 0.1)
    main.end(is_full=True)
    assert main.sizes() == [0, 5], "in turn with the backlog"
    mail = [entry._replace(queue="mail") for entry in main.entries(3, start=200)]
    main.take(main.entries(5, start=100) + mail)
    main.clock.advance(grace_s + 0.1)
    main.pump()
    assert main.late() == 3, "those of a queue without a backlog go to the table"
    main.clock.advance(BACKLOG_WAIT_S)
    main.pump()
    assert main.late() == 8


def test_entries_of_rows_that_a_drain_has_claimed_are_forgotten(draining: Main) -> None:
    """Otherwise every second claim of a standing backlog would find rows that have ended."""
    main, now = draining, draining.clock.now_us()
    main.take([Entry(id, 0, now - 2) for id in range(100, 110)])
    for id, version in ((1, 0), (1, 0), (2, 6), (2, 7), (2, 5), (5, 0)):
        main.take([Entry(id, version, now - 1)])
    main.take([Entry(3, 0, now - 2, "default", 1), Entry(4, 0, now - 2, "mail")])
    main.take([*main.entries(30, start=200), Entry(999, 0, now, "sms")])
    main.end(is_full=True, drained=dict.fromkeys([2, 5, *range(100, 110), 999], 6))
    [chunk] = [chunk for chunk in main.requests if chunk.entries]
    assert [entry.id for entry in chunk.entries][:5] == [3, 4, 1, 2, 200]
    main.clock.advance(60)
    for _ in range(2):
        main.pump()
    assert main.waiting == 0, "late entries are left to the table"


# -- bursts ---------------------------------------------------------------------------------------


def test_a_burst_of_slow_tasks_is_left_to_the_table_and_claimed_ahead(main: Main) -> None:
    main.learn(0.02)
    main.take(main.entries(100) + main.entries(100, priority=5, start=101))
    assert main.drained() == ["default"] * 2
    assert main.continue_s() == [CONTINUE_S] * 2
    assert (main.waiting, main.late()) == (0, 200)
    for drains in ([("default", [0, 5])], []):
        main.ask_for_help()
        assert main.asked() == drains, "other workers are asked once"


# -- drains of queues whose rows are overdue ------------------------------------------------------


def test_a_drain_looks_at_the_priorities_of_entries_that_come_meanwhile(main: Main) -> None:
    main.drain("default", 0)
    now = main.clock.now_us()
    main.take([Entry(1, 0, now, "default", 8), Entry(2, 0, now, "mail", 9)])
    main.end(is_full=True)
    drains = [chunk for chunk in main.requests if chunk.drained_queue]
    assert {*drains[-1].priorities} == {0, 8}


def test_a_solo_pool_drains_chunk_by_chunk(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solo, "TaskPool", type(main.pool))
    main.drain()
    main.end(is_full=True)
    assert main.continue_s() == [0, 0]


# -- the end of a dispatcher ----------------------------------------------------------------------


def test_a_worker_that_stops_sends_back_what_waits_and_what_chunks_report(main: Main) -> None:
    main.take(25)
    first, second = (WaitlistState("default", tag) for tag in ("test.first", "test.second"))
    main.end(waitlists=(first,))
    main.drain("mail", 5, 0)
    assert not main.broker.requested_drains, "this worker continues with both"
    for drains in ([("default", []), ("mail", [0, 5])], []):
        main.stop()
        assert (len(main.broker.armed), main.asked()) == (5, drains)
    main.broker.lose()
    [early] = main.entries(1, start=50)
    main.end(early=(early,), waitlists=(first, second))
    assert (main.broker.armed, main.asked()) == ([early], [("default", [])])
    assert (len(main.requests), main.held) == (1, 0), "it sends no chunk, and its wheel has stopped"


def test_early_entries_are_held_before_the_dispatcher_closes(
    main: Main, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a closed dispatcher holds is lost, because its wheel has stopped."""
    hold, closing = main.runtime.wheel.add, list[Future[Any]]()

    def close_and_hold(entries: Any) -> bool:
        closing.append(pool.submit(main.dispatcher.close))
        assert not wait(closing, 0.2).done
        return hold(entries)

    monkeypatch.setattr(main.runtime.wheel, "add", close_and_hold)
    main.take(1)
    main.end(0, early=(Entry(7, 0, main.clock.now_us() + 1_000_000),))
    closing[0].result(10)
    assert main.held == 1


# -- chunks and pools that fail -------------------------------------------------------------------


def test_chunks_pause_after_an_outage_of_the_database_or_of_the_pool(main: Main) -> None:
    main.take(100)
    main.end(0, error="away", reason=AWAY)
    main.pump()
    assert len(main.requests) == 1
    main.pump_later(1)
    assert len(main.requests) == 2, "another try after the pause"
    main.pool.is_broken = True
    main.end(10)
    assert (main.waiting, main.world.count("chunk.failed")) == (20, 2)
    main.pool.is_broken = False
    main.end(10)
    assert main.requests == []
    main.pump_later(1)
    assert main.sizes() == [10, 10]


@pytest.mark.parametrize("reason", [FailureReason.UNKNOWN, FailureReason.REFUSED])
def test_other_failures_pause_nothing(make_main: MakeMain, reason: FailureReason) -> None:
    """The sweep finds the rows of the chunk again, and requests the drain again."""
    main = make_main(1)
    main.take(1)
    main.drain()
    failed = Report(error="KeyError: a bug, or a row that cannot be read", reason=reason)
    assert len(main.pool.end(failed).entries) == 1
    assert main.pool.end(failed).drained_queue == "default", "it does not wait"
    main.take(1, start=2)
    assert len(main.pool.end(failed).entries) == 1, "nor does the next task"
    main.pump_later(60)
    assert main.requests == [], "neither the entries nor the drain are tried again"


def test_a_drain_survives_its_process_and_not_the_loss_of_the_database(main: Main) -> None:
    main.drain()
    main.lose_process()
    wait_until(lambda: main.requests, 5, "another process to go on")
    assert main.world.count("chunk.failed") == 1
    main.end(0, error="away", reason=AWAY)
    main.pump_later(60)
    assert main.requests == []


def test_rows_that_outlive_their_chunk_are_known_until_a_report_or_a_death(main: Main) -> None:
    """Their leases are renewed, and a stop waits for them."""
    dispatcher = main.dispatcher
    main.take(20)
    for pid in (1, 2):
        main.end(pid=pid, detached=(pid, 70 + pid))
    assert dispatcher.running() == ([], {1: (1, 71), 2: (2, 72)})
    assert (dispatcher.pids(), dispatcher.is_at_work) == ({1, 2}, True)
    main.take(1)
    main.end(pid=1)
    assert (dispatcher.pids(), dispatcher.is_at_work) == ({2}, True)
    dispatcher.process_died(2)
    assert (dispatcher.running(), dispatcher.is_at_work) == (([], {}), False)


# -- waitlists ------------------------------------------------------------------------------------


def test_a_full_waitlist_is_checked_again_later(make_main: MakeMain) -> None:
    main, reports = make_main(1), partial(WaitlistState, "default", "note")

    def check_s() -> float:
        """Return after how many seconds the process is sent to the waitlist."""
        began = main.time.at
        while not main.requests and main.time.at < began + 5:
            main.pump_later(0.002)
        return round(main.time.at - began, 2)

    for start, recheck_s in ((1, WAITLIST_RECHECK_S), (2, 2 * WAITLIST_RECHECK_S)):
        main.take(1, start)
        main.end(waitlists=(reports(0, recheck_s),))
    assert check_s() == WAITLIST_RECHECK_S, "the second one adds nothing"
    waits = []
    for _ in range(8):
        main.end(0, waitlists=(reports(0),))
        waits.append(check_s())
    # Soon, then less and less often.
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S]
    main.end(0, waitlists=(reports(1),))
    assert check_s() == 0
    main.end(0, waitlists=(reports(0),))
    assert check_s() == 0.02
    main.lose_process()
    assert check_s() == 0.04, "the process that looked has died"


def test_many_waitlists_are_checked_rarely(
    make_main: MakeMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_waitlists, "MAX_TRACKED_WAITLISTS", 30)
    monkeypatch.setattr(tracked_waitlists, "MAX_CHECKS_PER_S", 6)
    main, looks = make_main(1), list[str]()
    main.take(1)
    main.end(waitlists=tuple(WaitlistState("default", f"t{n:05}", 0) for n in range(90)))
    for _ in range(100):
        main.pump_later(WAITLIST_RECHECK_S / 2)
        while main.requests:
            queue, tag = main.requests[0].waitlist or ("", "")
            looks.append(tag)
            main.end(0, waitlists=(WaitlistState(queue, tag, 0),))
    assert len({*looks}) == 30, "the sweep comes by the others"
    assert len(looks) <= 6 * 50 + 5 * 30, "six a second, and the first ones sooner"


def test_a_raised_limit_is_used_in_a_second_while_long_rows_run(make_main: MakeMain) -> None:
    main, reports = make_main(80), partial(WaitlistState, "default", "note")
    main.world.limit(concurrency=5)
    main.read_policies()
    main.take(1)
    main.end(waitlists=(reports(5),))
    assert len(main.requests) == 5, "each runs a long row"
    for _ in range(10):
        main.pump_later(1)
        while len(main.requests) > 5:
            main.pool.end(Report(waitlists=(reports(0),)), -1)
    main.world.limit(concurrency=50)
    for _ in range(6):
        main.read_policies()
        main.pump_later(0.1)
    assert len(main.requests) >= 50


def test_long_rows_start_at_the_pace_of_a_raised_rate(make_main: MakeMain) -> None:
    main, reports, pace_s = make_main(80), partial(WaitlistState, "default", "note"), 0.11
    main.world.limit(rate=1, rate_period_s=3600.0)
    main.read_policies()
    main.take(1)
    main.end(waitlists=(reports(0),))

    def pump_later(allowed: float) -> None:
        """Keep the chunks of as many rows as may start; the others find when the next one may."""
        main.pump_later(0.02)
        while len(main.requests) > int(allowed):
            to_next_s = (1 + int(allowed) - allowed) * pace_s
            main.pool.end(Report(waitlists=(reports(0, min(to_next_s, 1.0)),)), -1)

    for _ in range(500):
        pump_later(1)
    main.world.limit(rate=600, rate_period_s=60.0)
    main.read_policies()
    for turn in range(1, 300):
        allowed = 1 + turn * 0.02 / pace_s
        pump_later(allowed)
        assert len(main.requests) >= int(allowed - 0.5 / pace_s)
