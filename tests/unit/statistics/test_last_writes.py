"""A process that ends writes its counts to all databases simultaneously and waits briefly."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from delaytasks.core.run_counts import RunCounts, RunStatistics
from delaytasks.statistics import writer
from delaytasks.statistics.writer import StatisticsWriter, write_rest
from tests.unit.runtime_harness import runtime_of_two_shards

#: Ends a test that would wait forever if the code was wrong.
PATIENCE_S = 20


def test_a_worker_writes_to_all_databases_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, met = threading.Barrier(2), list[int]()
    monkeypatch.setattr(
        StatisticsWriter, "write", lambda self: met.append(both.wait(PATIENCE_S / 4))
    )
    monkeypatch.setattr(writer, "LAST_WRITES_S", PATIENCE_S)
    runtime = runtime_of_two_shards(tmp_path)
    runtime.write_statistics()
    assert sorted(met) == [0, 1]


def test_a_database_that_does_not_answer_does_not_delay_the_end_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, began, ended = threading.Event(), list[int](), list[bool]()

    def write(self: StatisticsWriter) -> None:
        began.append(self._shard.number)
        ended.append(answer.wait(PATIENCE_S))

    monkeypatch.setattr(StatisticsWriter, "write", write)
    monkeypatch.setattr(writer, "LAST_WRITES_S", 0.05)
    runtime = runtime_of_two_shards(tmp_path)
    counts = RunCounts()
    counts.add_outcome("done")
    rest = RunStatistics((("a", counts.as_list()),))
    try:
        runtime.write_statistics()
        write_rest(runtime.shards, {0: rest, 1: rest}, 10, runtime.events)
        assert ended == []
    finally:
        answer.set()
    assert set(began) <= {0, 1}
