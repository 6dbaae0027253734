"""psycopg 3 compared with psycopg2, in turn on the same tables of PostgreSQL.

The figures are the CPU time of this process, which other processes of a busy machine do not change
much, and the duration of single calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from sqlalchemy import make_url

from benchmarks import ours, table
from benchmarks.settings import TABLE_PREFIX, database_url
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks import NewTask
from delaytasks.db.store import Store
from delaytasks.model.task import DelayedTask, Entry, Settlement
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings

DRIVERS = ("psycopg", "psycopg2")
CALLS, CHUNK, BULK = 200, 200, 5_000


def run(stage: CaseContext) -> None:
    if make_url(database_url()).get_backend_name() != "postgresql":
        raise BenchError("drivers: set DELAYTASKS_BENCH_DATABASE_URL to a PostgreSQL database")
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(_store(driver))) for driver in DRIVERS]
        _compare(stage, stores, "INSERT of a task", CALLS, _insert)
        _compare(stage, stores, f"claim and settle {CHUNK} tasks", CHUNK, _work_off)
        _compare(stage, stores, f"COPY of {BULK:,} tasks", BULK, _copy)
    table.clear()


def _store(driver: str) -> Store:
    url = make_url(database_url()).set(drivername=f"postgresql+{driver}")
    text = url.render_as_string(hide_password=False)
    return Store(text, load_settings({}, {}, database_url=text, table_prefix=TABLE_PREFIX))


def _compare(
    stage: CaseContext,
    stores: Sequence[Store],
    what: str,
    tasks: int,
    prepare: Callable[[Store], Callable[[], object]],
) -> None:
    """Add the times for each task, in microseconds. The first block of each driver warms up."""
    cpu: list[list[float]] = [[] for _ in stores]
    took: list[list[float]] = [[] for _ in stores]
    for number in range(stage.size(10, 4) + 1):
        for place, store in enumerate(stores):
            work = prepare(store)
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            work()
            cpu_s, took_s = time.process_time() - cpu_before, time.perf_counter() - wall_before
            if number:
                cpu[place].append(cpu_s * 1e6 / tasks)
                took[place].append(took_s * 1e6 / tasks)
        table.clear()
    for kind, times in (("CPU", cpu), ("duration", took)):
        figure = stage.figure("drivers", f"{what}: {kind} a task", "µs", against="psycopg2:")
        figure.add(*map(statistics.median, times))


def _tasks(count: int) -> list[DelayedTask]:
    """Return tasks that are due now and were not written yet."""
    new = (NewTask(ours.TAG, {"number": number}, 0) for number in range(count))
    return runtime_of(ours.delays).producer.build(new, "reject")


def _insert(store: Store) -> Callable[[], object]:
    tasks = _tasks(CALLS)
    return lambda: [store.tasks.insert(task) for task in tasks]


def _copy(store: Store) -> Callable[[], object]:
    return partial(store.tasks.insert_many, _tasks(BULK))


def _work_off(store: Store) -> Callable[[], object]:
    tasks = _tasks(CHUNK)
    store.tasks.insert_many(tasks)
    claims = store.claims("bench", None)
    entries = [Entry.of(task) for task in tasks]

    def work() -> None:
        claimed = claims.claim(entries)
        if len(claims.settle([Settlement(one, "succeed") for one in claimed])) != CHUNK:
            raise BenchError("drivers: a chunk was settled only in part")

    return work
