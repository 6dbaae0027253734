"""Chunks of several shards."""

from __future__ import annotations

import pytest

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.ids import shard_of
from delaytasks.execution.failure_reason import FailureReason
from delaytasks.execution.runner import Report
from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands


def test_a_chunk_has_rows_of_one_shard_and_chunks_alternate_between_shards() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take([*bench.entries_of(0, 30), *bench.entries_of(1, 30)])
    bench.pool.end(Report(10, 10, 0.05))
    bench.pool.end(Report(10, 10, 0.05))
    assert [request.shard for request, _, _ in bench.pool.requests] == [0, 1]
    assert [
        {shard_of(entry.id) for entry in request.entries} for request, _, _ in bench.pool.requests
    ] == [
        {0},
        {1},
    ]


#: The report of a chunk that found its database unavailable.
AWAY = Report(error="StoreUnavailableError: away", reason=FailureReason.UNAVAILABLE)


def test_a_shard_that_is_unavailable_gets_no_chunk_until_it_answers_and_others_do(
    hands: Hands,
) -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(1, 1))
    bench.pool.end(AWAY)
    hands.at += 60
    bench.dispatcher.take([*bench.entries_of(1, 1), *bench.entries_of(0, 1)])
    assert [request.shard for request, _, _ in bench.pool.requests] == [0]

    def refuse() -> None:
        raise StoreUnavailableError("shard 1 is away", 1)

    assert not bench.dispatcher.shard_health.check(1, refuse)
    assert not bench.dispatcher.shard_health.check(1, refuse)
    assert (
        bench.events.counts["store.down"],
        bench.dispatcher.shard_health.info()[1]["is_up"],
    ) == (1, False)
    hands.at += 1
    assert bench.dispatcher.shard_health.check(1, lambda: None)
    assert (bench.events.counts["store.up"], bench.dispatcher.shard_health.info()[1]["is_up"]) == (
        1,
        True,
    )
    assert [request.shard for request, _, _ in bench.pool.requests] == [0, 1]


def test_a_shard_whose_answer_is_late_gets_no_chunk(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.pool.limit = 4
    bench.dispatcher.take(bench.entries_of(1, 1))

    def never(waits_s: float, requests: int) -> None:
        hands.at += waits_s
        bench.dispatcher.shard_health.check_answers()
        bench.dispatcher.take(bench.entries_of(1, 1))
        assert len(bench.pool.requests) == requests

    assert bench.dispatcher.shard_health.check(1, lambda: (never(1, 2), never(2, 2)))
    assert (bench.events.counts["store.down"], bench.events.counts["store.up"]) == (1, 1)
    assert len(bench.pool.requests) == 3, "it answered"


def test_a_shard_leaves_the_last_process_to_the_others(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.pool.limit = 3
    bench.dispatcher.take(bench.entries_of(0, 100))
    assert [request.shard for request, _, _ in bench.pool.requests] == [0, 0]
    bench.dispatcher.take(bench.entries_of(1, 1))
    assert [request.shard for request, _, _ in bench.pool.requests] == [0, 0, 1]


def test_a_shard_that_answers_has_the_last_process_too_when_its_chunks_take_long(
    hands: Hands,
) -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(0, 100))
    hands.at += 0.5
    bench.dispatcher.shard_health.check(0, lambda: None)
    assert len(bench.pool.requests) == 1, "it answered, but that chunk may be at its claim"
    hands.at += 1
    bench.dispatcher.take(bench.entries_of(0, 1))
    assert len(bench.pool.requests) == 1, "nobody knows whether it answers still"
    bench.dispatcher.shard_health.check(0, lambda: None)
    assert [request.shard for request, _, _ in bench.pool.requests] == [0, 0]


def test_a_single_shard_is_not_asked_and_may_use_all_processes(
    hands: Hands, bench: DispatcherHarness
) -> None:
    def fail() -> None:
        raise AssertionError("it was asked")

    bench.dispatcher.take(bench.entries(100))
    assert len(bench.pool.requests) == 2
    assert bench.dispatcher.shard_health.check(0, fail)
    bench.pool.end(AWAY)
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 1
    hands.at += 1
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 2, "after its pause it is tried again"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("reason", [FailureReason.UNKNOWN, FailureReason.REFUSED])
def test_a_failure_of_a_database_that_answers_pauses_nothing_and_is_not_repeated(
    hands: Hands, reason: FailureReason, shards: int
) -> None:
    """The sweep finds the rows of the chunk again, and requests the drain again."""
    bench = DispatcherHarness(shards=shards)
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


def test_a_drain_is_of_the_shard_that_its_message_names() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.start_drain("default", [0], shard=1)
    bench.dispatcher.start_drain("default", [0], shard=7)
    assert [(request.drained_queue, request.shard) for request, _, _ in bench.pool.requests] == [
        ("default", 1)
    ]


def test_entries_of_a_shard_that_is_not_known_yet_are_left_to_others() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(2, 5))
    assert (bench.dispatcher.waiting, bench.pool.requests) == (0, [])
