"""A partitioned task table compared with a plain one: the cost of a chunk, and the removal of old
tasks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from threading import Event

from benchmarks import ours, table
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks.core.clock import wall_ms
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.task import DelayTask
from delaytasks.maintenance.cleanup import PURGE_ROWS
from delaytasks.partitions.conversion import convert
from delaytasks.partitions.pruning import prune
from delaytasks.partitions.table import Partitions
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from delaytasks.wiring import wiring_of

WEEK = timedelta(days=7)
WEEKS = 8
CHUNK, WARM_UP, REPEATS = 200, 5, 60
PREFIX = "bench_parts_"
_make_id = IdMaker(wall_ms)


class Earlier(Partitions):
    """A table that was converted earlier and has this number of partitions now."""

    def now(self) -> datetime:
        return super().now() - (WEEKS + 1) * WEEK


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("partitions: skipped, since only PostgreSQL supports them")
        return
    rows, old = stage.size(200_000, 5000), stage.size(1_000_000, 20_000)
    plain = wiring_of(ours.delays).store
    table.clear()
    with table.other_tables(PREFIX) as parted:
        convert(Earlier(parted.database, PREFIX), WEEK, WEEKS + 4)
        now = plain.tasks.now()
        for store in (plain, parted):
            for week in range(WEEKS):
                table.fill_finished(store, old if week == WEEKS - 1 else rows, now - week * WEEK)
            table.settle_down(store.schema.tasks.name)
        _measure_chunks(stage, plain, parted, f"{WEEKS} weeks of {rows:,} rows")
        _measure_leaving(stage, plain, parted, old)
    table.clear()


def _measure_chunks(stage: CaseContext, plain: Store, parted: Store, where: str) -> None:
    """Measure in turn, so that a slow period affects both tables."""
    took: dict[tuple[str, Store], list[float]] = {}
    for _ in range(WARM_UP + REPEATS):
        for store in (plain, parted):
            for what, ms in _chunk_ms(store).items():
                took.setdefault((what, store), []).append(ms)
    for what in ("claim by id and settle", "claim_due and settle"):
        ours_ms, plain_ms = (
            statistics.median(took[what, store][WARM_UP:]) for store in (parted, plain)
        )
        stage.figure("partitions", f"{what} {CHUNK}, {where}", "ms", against="plain:").add(
            ours_ms, plain_ms
        )


def _chunk_ms(store: Store) -> dict[str, float]:
    claims = store.claims("bench", None)
    entries = [Entry.of(one) for one in schedule(store, CHUNK)]
    found = {"claim by id and settle": _timed(lambda: settle(claims, claims.claim(entries), CHUNK))}
    schedule(store, CHUNK)
    found["claim_due and settle"] = _timed(
        lambda: settle(claims, claims.claim_due("default", [0], CHUNK), CHUNK)
    )
    return found


def schedule(store: Store, count: int) -> list[DelayTask]:
    now = store.tasks.now()
    tasks = [DelayTask(_make_id(), ours.TAG, "{}", now, create_time=now) for _ in range(count)]
    store.tasks.insert_many(tasks)
    return tasks


def settle(claims: Claims, claimed: list[DelayTask], count: int) -> None:
    if len(claims.settle([Settlement(one, "succeed") for one in claimed])) != count:
        raise BenchError(f"a chunk of {count} was claimed or settled only in part")


def _timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return (time.perf_counter() - before) * 1000


def _measure_leaving(stage: CaseContext, plain: Store, parted: Store, old: int) -> None:
    """Remove last week's rows, and measure the slowest call of a producer meanwhile."""
    age = (WEEKS - 2) * WEEK

    def purge() -> None:
        while plain.sweeps.purge(age.total_seconds(), PURGE_ROWS):
            pass

    dropped_ms, waited_ms = _with_a_producer(
        parted, lambda: list(prune(Partitions(parted.database, PREFIX), age))
    )
    purged_ms, slowest_ms = _with_a_producer(plain, purge)
    what = f"{old:,} finished rows"
    stage.figure("partitions", f"{what} dropped", "s", against="purged:").add(
        dropped_ms / 1000, purged_ms / 1000
    )
    stage.figure("partitions", f"{what} dropped, slowest insert", "ms", against="purged:").add(
        waited_ms, slowest_ms
    )


def _with_a_producer(store: Store, work: Callable[[], object]) -> tuple[float, float]:
    is_done = Event()

    def produce() -> float:
        slowest = 0.0
        while not is_done.is_set():
            slowest = max(slowest, _timed(lambda: schedule(store, 1)))
            is_done.wait(0.005)
        return slowest

    with ThreadPoolExecutor(1) as pool:
        slowest = pool.submit(produce)
        try:
            took = _timed(work)
        finally:
            is_done.set()
        return took, slowest.result()
