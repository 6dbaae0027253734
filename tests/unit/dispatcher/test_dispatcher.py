"""Chunks, their size and order, and the end of a dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import WaitlistState
from delaytasks.core.settings import Settings
from delaytasks.execution.runner import FailureReason, Report
from delaytasks.worker.chunk_queue import BACKLOG_WAIT_S, UnfinishedWork
from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands


def test_no_more_chunks_are_dispatched_than_the_pool_has_processes(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(1000))
    assert bench.sizes() == [10, 10]
    assert bench.dispatcher.waiting == 980


def test_chunks_grow_to_the_number_of_rows_that_fits_the_time_budget(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(1000))
    bench.pool.end(Report(10, 10, 10 * 0.0001))
    assert bench.sizes() == [10, 200], "a tenth of a millisecond each: as many as a chunk may have"
    bench.pool.end(Report(10, 10, 10 * 0.050))
    bench.pool.end(Report(200, 200, 200 * 0.050))
    assert bench.sizes()[-1] < 5, "50 ms each: hardly more than one"


def test_waiting_entries_are_shared_among_free_processes(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(6))
    assert bench.sizes() == [3, 3]


def test_late_entries_are_left_to_the_table_even_if_the_pool_is_busy(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.dispatcher.take(bench.entries(5000, start=100))
    bench.clock.advance(2)
    bench.dispatcher.take([])
    assert bench.dispatcher.waiting == 0
    assert bench.events.counts["entry.late"] == 5000
    assert bench.dispatcher.take_left_to_table().queues == [("default", {0})]
    bench.pool.end(Report(10, 10, 0.01))
    assert bench.pool.requests[-1][0].drained_queue == "default"


def test_late_entries_wait_longer_if_their_queue_has_a_backlog(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.start_drain("default", [0])
    # The queue has a backlog, so both processes drain it.
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    grace_s = Settings().grace_s
    assert bench.dispatcher.grace_s("default") == grace_s + BACKLOG_WAIT_S
    assert bench.dispatcher.grace_s("mail") == grace_s
    bench.dispatcher.take(bench.entries(5))
    bench.clock.advance(grace_s + BACKLOG_WAIT_S - 0.1)
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    assert [len(request.entries) for request, _, _ in bench.pool.requests] == [0, 5], (
        "in turn with the backlog"
    )
    mail = [entry._replace(queue="mail") for entry in bench.entries(3, start=200)]
    bench.dispatcher.take(bench.entries(5, start=100) + mail)
    bench.clock.advance(grace_s + 0.1)
    bench.dispatcher.take([])
    assert bench.events.counts["entry.late"] == 3, (
        "those of a queue without a backlog go to the table"
    )
    bench.clock.advance(BACKLOG_WAIT_S)
    bench.dispatcher.take([])
    assert bench.events.counts["entry.late"] == 8


def test_the_capacity_is_a_chunk_and_the_next_one_of_each_process(bench: DispatcherHarness) -> None:
    assert bench.dispatcher.capacity() == 400, "two processes, of which nothing is known yet"
    bench.dispatcher.take(bench.entries(20))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    assert bench.dispatcher.capacity() == 40, "ten rows each in a time budget"
    assert bench.dispatcher.capacity(coming=15) == 25
    bench.dispatcher.take(bench.entries(15, start=50))
    assert bench.dispatcher.capacity() == 20, "both work, and nothing waits"
    bench.dispatcher.take(bench.entries(5, start=100))
    assert bench.dispatcher.capacity() == 15
    bench.dispatcher.take(bench.entries(6, start=200))
    assert bench.dispatcher.capacity() == 0, "not worth the way"
    bench.dispatcher.close()
    assert bench.dispatcher.capacity() == 0


def test_chunks_are_made_in_the_order_in_which_rows_were_written(bench: DispatcherHarness) -> None:
    """Entries that arrive together are sorted. A later entry waits behind earlier ones."""
    bench.dispatcher.take(bench.entries(20))
    now = bench.clock.now_us()
    ids = list(range(101, 141))
    odd, even = ([Entry(id, 0, now) for id in ids if id % 2 == rest] for rest in (1, 0))
    bench.dispatcher.take(odd)
    bench.dispatcher.take([*even, Entry(90, 0, now + 1), Entry(200, 0, now - 1)])
    bench.dispatcher.take([Entry(1, 0, now)])
    ran: list[int] = []
    while bench.pool.requests:
        request = bench.pool.end(Report(10, 10, 10 * 0.005))
        ran += [entry.id for entry in request.entries]
    assert ran[20:] == [200, *ids, 90, 1]


def test_a_process_that_will_be_busy_for_long_adds_no_capacity(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.clock.advance(0.5)
    assert bench.dispatcher.capacity() == 0, "its chunk takes longer than the time budget"
    bench.pool.end(Report(10, 10, 10.0))
    assert bench.dispatcher.capacity() == 1, (
        "a second each: the free process takes one, and the next one when that is over"
    )
    bench.dispatcher.take(bench.entries(1, start=100))
    assert bench.dispatcher.capacity() == 0


def test_a_closed_dispatcher_returns_waiting_entries_and_starts_no_chunk(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(25))
    assert len(bench.dispatcher.close().entries) == 5
    bench.pool.end(Report(10, 10, 0.001))
    assert len(bench.pool.requests) == 1


def test_work_that_a_chunk_reports_after_the_close_is_left_to_other_workers(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(12))
    bench.pool.end(Report(10, 10, 0.001, waitlists=(WaitlistState("default", "test.first"),)))
    assert not bench.sent_back, "this worker continues with them"
    bench.dispatcher.close()
    tags = "test.first", "test.second"
    [early] = bench.entries(1, start=50)
    bench.pool.end(
        Report(
            2,
            2,
            0.001,
            early=(early,),
            waitlists=tuple(WaitlistState("default", tag) for tag in tags),
        )
    )
    assert bench.sent_back == [UnfinishedWork([early], [("default", set())])]
    assert not bench.held, "the wheel has stopped"


def test_entries_that_a_chunk_found_early_are_held_before_a_dispatcher_can_close(
    bench: DispatcherHarness,
) -> None:
    """A closed dispatcher would pass them to a timing wheel that is empty and no longer turns."""
    closed: list[bool] = []
    closing: list[threading.Thread] = []

    def close() -> None:
        bench.dispatcher.close()
        closed.append(True)

    def hold(entries: Sequence[Entry]) -> list[Entry]:
        closing.append(threading.Thread(target=close))
        closing[0].start()
        closing[0].join(0.2)  # `close` waits for the end of the chunk
        bench.held += entries
        assert not closed, "what is held now would be lost"
        return []

    bench.hold = hold  # type: ignore[method-assign]
    bench.dispatcher.take(bench.entries(1))
    early = Entry(7, 0, bench.clock.now_us() + 1_000_000)
    bench.pool.end(Report(0, early=(early,)))
    closing[0].join(10)
    assert (bench.held, closed, bench.sent_back) == ([early], [True], [])


# -- batch processors ----------------------------------------------------------------------------


def test_rows_of_one_batch_stay_together_although_other_processes_are_free(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(10))
    assert bench.sizes() == [5, 5]
    bench.pool.end(Report(5, 5, 5 * 0.001, wanted=40))
    bench.pool.end(Report(5, 5, 5 * 0.001, wanted=40))
    bench.dispatcher.take(bench.entries(60, start=100))
    assert bench.sizes() == [40, 20], "and not 30 for each"
    bench.pool.end(Report(40, 40, 40 * 0.001))
    bench.pool.end(Report(20, 20, 20 * 0.001))
    bench.dispatcher.take(bench.entries(60, start=200))
    assert bench.sizes() == [30, 30], "others came meanwhile, who are shared"


def test_a_chunk_has_all_rows_that_can_start_together_even_beyond_the_time_budget(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(10))
    bench.pool.end(Report(5, 5, 5 * 0.2, wanted=30))
    bench.pool.end(Report(5, 5, 5 * 0.2, wanted=30))
    bench.dispatcher.take(bench.entries(100, start=100))
    assert bench.sizes() == [30, 30]


def test_detached_rows_are_known_until_their_process_reports_their_end(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(400))
    bench.pool.end(Report(10, 8, 0.01, pid=1, detached=(4, 5)))
    bench.pool.end(Report(10, 9, 0.01, pid=2, detached=(9,)))
    assert bench.dispatcher.running()[1] == {1: (4, 5), 2: (9,)}
    assert len(bench.pool.requests) == 2, "and the next chunks come"
    bench.pool.end(Report(1, 3, 0.01, pid=1))
    away = FailureReason.UNAVAILABLE
    bench.pool.end(Report(error="away", reason=away, pid=2, detached=(9, 12)))
    assert bench.dispatcher.running()[1] == {2: (9, 12)}


def test_after_a_chunk_found_the_database_unavailable_chunks_pause(
    hands: Hands, bench: DispatcherHarness
) -> None:
    bench.dispatcher.take(bench.entries(100))
    assert len(bench.pool.requests) == 2
    bench.pool.end(Report(error="away", reason=FailureReason.UNAVAILABLE))
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 1
    hands.at += 1
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 2, "after its pause it is tried again"


@pytest.mark.parametrize("reason", [FailureReason.UNKNOWN, FailureReason.REFUSED])
def test_a_failure_of_a_database_that_answers_pauses_nothing_and_is_not_repeated(
    hands: Hands, reason: FailureReason
) -> None:
    """The sweep finds the rows of the chunk again, and requests the drain again."""
    bench = DispatcherHarness()
    bench.pool.limit = 1
    bench.dispatcher.take(bench.entries(1))
    bench.dispatcher.start_drain("default", [0])
    failed = Report(error="KeyError: a bug, or a row that cannot be read", reason=reason)
    assert len(bench.pool.end(failed).entries) == 1
    assert bench.pool.end(failed).drained_queue == "default", "it does not wait"
    bench.dispatcher.take(bench.entries(1, start=2))
    assert len(bench.pool.end(failed).entries) == 1, "nor does the next task"
    hands.at += 60
    bench.dispatcher.pump()
    assert bench.pool.requests == [], "neither the entries nor the drain are tried again"
