"""A pool process sends counts to its main process, and a message that is too long stops neither."""

from __future__ import annotations

import pytest

from delaytasks.core.run_counts import RunStatistics
from delaytasks.worker import late_counts
from delaytasks.worker.late_counts import LateCounts

COUNTS = RunStatistics((("mail", [1]),))


def too_long(size: int) -> RunStatistics:
    return RunStatistics((("x" * size, [1]),))


def test_counts_arrive_with_their_shard() -> None:
    errors = list[BaseException]()
    counts = LateCounts(errors.append)
    counts.send(3, lambda: COUNTS)
    assert list(counts.received()) == [(3, COUNTS)]
    assert not errors


def test_a_truncated_message_is_reported_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = list[BaseException]()
    counts = LateCounts(errors.append)
    monkeypatch.setattr(late_counts, "MAX_COUNTS_BYTES", 1000)
    counts.send(0, lambda: too_long(2000))
    counts.send(3, lambda: COUNTS)
    assert list(counts.received()) == [(3, COUNTS)]
    assert len(errors) == 1


def test_a_message_that_the_socket_refuses_is_reported_and_the_next_one_is_sent() -> None:
    errors = list[BaseException]()
    counts = LateCounts(errors.append)
    counts.send(0, lambda: too_long(4 * late_counts.MAX_COUNTS_BYTES))
    counts.send(3, lambda: COUNTS)
    assert list(counts.received()) == [(3, COUNTS)]
    [error] = errors
    assert isinstance(error, OSError)
