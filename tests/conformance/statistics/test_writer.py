"""A write that fails is repeated if it was certainly not committed, and otherwise given up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.exc import NoResultFound

from delaytasks import DelayTasks
from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.run_counts import RunCounts, RunStatistics
from delaytasks.runtime import runtime_of
from delaytasks.statistics.statistics_table import (
    WRITE_S,
    StatisticsTable,
    StatisticsWriter,
    WorkerCounts,
)
from delaytasks.storage.store import Store


@pytest.fixture
def counts(store: Store, delays: DelayTasks) -> WorkerCounts:
    made = WorkerCounts(runtime_of(delays).clock, 10)
    run = RunCounts()
    run.add_outcome("done")
    made.add(RunStatistics((("a", run.as_list()),)))
    return made


def written(delays: DelayTasks) -> int:
    found = delays.statistics.totals(since="2h").get("a")
    return 0 if found is None else found.done


def writer_of(delays: DelayTasks, counts: WorkerCounts, events: Events) -> StatisticsWriter:
    runtime = runtime_of(delays)
    return StatisticsWriter(runtime.store, runtime.clock, counts, events)


def refuse(*_: Any) -> None:
    raise StoreUnavailableError("down")


def test_counts_are_written_once(delays: DelayTasks, counts: WorkerCounts) -> None:
    writer = writer_of(delays, counts, Events())
    writer.write()
    writer.write()
    assert written(delays) == 1


def test_counts_whose_write_failed_before_the_commit_are_written_later(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(delays, counts, Events())
    with monkeypatch.context() as patch:
        patch.setattr(StatisticsTable, "add", refuse)
        with pytest.raises(StoreError):
            writer.write()
    assert written(delays) == 0
    writer.write()
    assert written(delays) == 1


def test_counts_whose_commit_had_no_answer_are_not_written_twice(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(delays, counts, Events())
    database = runtime_of(delays).store.database
    begin: Callable[[], Any] = database.begin

    @contextmanager
    def lost() -> Any:
        with begin() as connection:
            yield connection
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(database, "begin", lost)
        with pytest.raises(StoreError):
            writer.write()
    writer.write()
    assert written(delays) == 1


def test_after_a_failed_write_the_loop_rests_as_long_as_after_another(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    writer = writer_of(delays, counts, events)
    writer._turn()
    monkeypatch.setattr(StatisticsTable, "add", refuse)
    assert writer._turn() == WRITE_S
    assert events.counts["loop.failed"] == 1


def test_counts_are_kept_after_an_error_that_is_not_of_the_database(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_group(*_: Any) -> None:
        raise NoResultFound

    writer = writer_of(delays, counts, Events())
    with monkeypatch.context() as patch:
        patch.setattr(StatisticsTable, "add", lose_group)
        with pytest.raises(NoResultFound):
            writer.write()
    writer.write()
    assert written(delays) == 1
