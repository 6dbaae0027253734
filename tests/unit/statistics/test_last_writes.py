"""A process that ends writes its counts, and waits briefly."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from delaytasks.core.run_counts import RunCounts, RunStatistics
from delaytasks.statistics import statistics_table as writer
from delaytasks.statistics.statistics_table import StatisticsWriter, write_rest
from tests.unit.runtime_harness import make_runtime

#: Ends a test that would wait forever if the code was wrong.
PATIENCE_S = 20


def test_a_database_that_does_not_answer_does_not_delay_the_end_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, ended = threading.Event(), list[bool]()

    def write(self: StatisticsWriter) -> None:
        ended.append(answer.wait(PATIENCE_S))

    monkeypatch.setattr(StatisticsWriter, "write", write)
    monkeypatch.setattr(writer, "LAST_WRITE_S", 0.05)
    runtime = make_runtime(tmp_path)
    counts = RunCounts()
    counts.add_outcome("done")
    rest = RunStatistics((("a", counts.as_list()),))
    try:
        runtime.write_statistics()
        write_rest(runtime.runtime, rest)
        assert ended == []
    finally:
        answer.set()
