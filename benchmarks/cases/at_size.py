"""The costs of sweeps, claim queries, chunks and searches in a large and in a small table, and of
claims among dead rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select

from benchmarks import ours
from benchmarks.figures import percentile
from benchmarks.run import Stage
from benchmarks.side import Figures, Side
from benchmarks.waiting import BenchError
from delaytasks import DelayTasks, Status
from delaytasks.model.task import DelayedTask, Entry, Settlement
from delaytasks.operate.state import task_counts
from delaytasks.runtime import runtime_of
from delaytasks.worker.sweep import PURGE_ROWS, RECOVER_ROWS

#: The numbers of waiting rows, and finished rows for each of them. The smallest comes first and is
#: the base of the comparison.
PENDING, QUICK, FINISHED = (10_000, 1_000_000, 10_000_000), (10_000, 50_000), 5
#: The same in all tables, since a query costs more if it finds more rows.
NEAR, OVERDUE, RUNNING, FAILED, CLAIMED, PAGE = 2000, 5000, 200, 200, 200, 100
WARM_UP, REPEATS = 3, 15
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
#: The name of a query, the query, and its expected answer.
Step = tuple[str, Callable[[], object], object]


def at_size(stage: Stage, side: Side) -> Figures:
    found: Figures = {}
    small: dict[str, float] = {}
    for pending in QUICK if stage.is_quick else PENDING:
        with side.prepared():
            key = _fill(stage, side, pending)
            took: dict[str, float] = {}
            for step in _sweeps(side.delays) + _searches(side.delays, key):
                took |= _median_ms([step])
            took |= _median_ms(_chunk(side.delays))
        small = small or took
        for what, ms in took.items():
            found[f"{what}; {pending:,} wait, ms"] = ms
            if took is not small:
                found[f"{what}; {pending:,} wait, x {PENDING[0]:,}"] = ms / small[what]
    return found


def _sweeps(delays: DelayTasks) -> list[Step]:
    """Return the queries of sweeps and of drains."""
    runtime, settings = runtime_of(delays), delays.settings
    sweeps, leases = runtime.store.sweeps, runtime.store.leases
    claims, queue = runtime.store.claims("bench", None), settings.default_queue
    now = runtime.clock.certain_now()
    until = now + timedelta(seconds=HOUR_S)
    stale, lost = settings.self_sweep_s, (settings.max_lost_leases, RECOVER_ROWS, settings.lost_s)
    return [
        ("begin_sweep", lambda: sweeps.begin_sweep(0, 1, 0.0) is not None, True),
        ("stale_sweep_partitions", lambda: sweeps.stale_sweep_partitions(1, stale), []),
        (f"near, {NEAR:,} rows", lambda: sum(map(len, sweeps.due_between(now, until, 0, 1))), NEAR),
        ("priorities, one overdue", lambda: len(sweeps.levels(settings.grace_s)), 1),
        ("priorities, none overdue", lambda: sweeps.levels(DAY_S), []),
        ("recover, none", lambda: leases.recover(*lost).total, 0),
        ("purge, no old rows", lambda: sweeps.purge(30 * DAY_S, PURGE_ROWS), 0),
        (f"claim_due of {CLAIMED}", lambda: len(claims.claim_due(queue, [0], CLAIMED)), CLAIMED),
        ("claim_recovered, no rows", lambda: claims.claim_recovered(queue, [0]), []),
    ]


def _searches(delays: DelayTasks, key: str) -> list[Step]:
    """Return the queries of the command line and of dashboards."""
    store = runtime_of(delays).store

    def page(**by: Any) -> int:
        return len(delays.find(**by, limit=PAGE).tasks)

    return [
        ("find, a page", page, PAGE),
        ("find NOT_COMPLETE, a page", lambda: page(status=Status.NOT_COMPLETE), PAGE),
        ("find DONE, a page", lambda: page(status=Status.DONE), PAGE),
        ("find FAILED, a page", lambda: page(status=Status.FAILED), PAGE),
        ("find by key", lambda: page(key=key), 1),
        ("get by tag and key", lambda: delays.get(tag=ours.TAG, key=key).key, key),
        ("counts", lambda: len(task_counts(store)), len(Status)),
    ]


def _chunk(delays: DelayTasks) -> list[Step]:
    """Return the statements of one chunk, each of which needs the one before it."""
    runtime = runtime_of(delays)
    tasks, claims = runtime.store.tasks, runtime.store.claims("bench", None)
    now, chunk = runtime.clock.certain_now(), list[DelayedTask]()

    def insert() -> int:
        chunk[:] = [
            DelayedTask(delays.new_id(), ours.TAG, "{}", now, create_time=now)
            for _ in range(CLAIMED)
        ]
        tasks.new.insert_many(chunk)
        return len(chunk)

    def claim() -> int:
        chunk[:] = claims.claim([Entry.of(one) for one in chunk])
        return len(chunk)

    def settle() -> int:
        return len(claims.settle([Settlement(one, "succeed") for one in chunk]))

    return [
        (f"insert {CLAIMED}", insert, CLAIMED),
        (f"claim {CLAIMED} by id", claim, CLAIMED),
        (f"settle {CLAIMED}", settle, CLAIMED),
    ]


CHUNK = 50


def long_transaction(stage: Stage, side: Side) -> Figures:
    """Claim while another transaction stays open, as that of a report does, so that the database
    cannot remove dead rows. The last quarter of the claims is measured, when most of them exist.
    """
    rounds, found = stage.size(3000, 200), {}
    with side.prepared():
        store = runtime_of(side.delays).store
        without = _claims(side.delays, rounds)
        engine = store.database.tx.execution_options(isolation_level="REPEATABLE READ")
        with engine.connect() as connection, connection.begin():
            connection.execute(select(func.count()).select_from(store.schema.tasks)).scalar()
            during = _claims(side.delays, rounds)
    for what, ms in during.items():
        name = f"{what} of {CHUNK}, p99, {2 * rounds * CHUNK:,} rows during an open transaction"
        found[f"{name}, ms"] = percentile(ms, 0.99)
        found[f"{what}, x without one"] = percentile(ms, 0.99) / percentile(without[what], 0.99)
    return found


def _claims(delays: DelayTasks, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of the last claims. Claimed rows are settled."""
    store = runtime_of(delays).store
    claims = store.claims("bench", None)
    found: dict[str, list[float]] = {"claim by id": [], "claim_due": []}
    for number in range(rounds):
        now = store.tasks.now()
        tasks = [
            DelayedTask(delays.new_id(), ours.TAG, "{}", now, create_time=now)
            for _ in range(2 * CHUNK)
        ]
        store.tasks.new.insert_many(tasks)
        for what, took_ms in found.items():
            began = time.perf_counter()
            if what == "claim by id":
                claimed = claims.claim([Entry.of(one) for one in tasks[:CHUNK]])
            else:
                claimed = claims.claim_due("default", [0], CHUNK)
            if number >= rounds * 0.75:
                took_ms.append((time.perf_counter() - began) * 1000)
            settled = claims.settle([Settlement(one, "succeed") for one in claimed])
            if len(settled) != CHUNK:
                raise BenchError("a chunk was claimed or settled only in part")
    return found


def _fill(stage: Stage, side: Side, pending: int) -> str:
    """Fill the table, and return the key of a waiting task."""
    rows = side.rows
    waiting = pending - NEAR - OVERDUE
    with rows.indexed_at_the_end():
        rows.fill(FINISHED * pending, Status.DONE, -7 * DAY_S, -HOUR_S, is_keyed=True)
        rows.fill(FAILED, Status.FAILED, -7 * DAY_S, -HOUR_S)
        rows.fill(waiting, Status.NOT_COMPLETE, 2 * HOUR_S, 7 * DAY_S, is_keyed=True)
    rows.fill(OVERDUE, Status.NOT_COMPLETE, -HOUR_S, -MINUTE_S)
    rows.fill(RUNNING, Status.RUNNING, -MINUTE_S, 0)
    key = rows.take_keys()
    rows.settle_down()
    # The near rows are inserted last, so that they are still near when they are read.
    rows.fill(NEAR, Status.NOT_COMPLETE, 10 * MINUTE_S, 11 * MINUTE_S)
    every = (FINISHED + 1) * pending
    each = ", ".join(f"{name} {size / every:.0f}" for name, size in rows.sizes())
    stage.say(f"at_size: {pending:,} wait, {every:,} rows, bytes a row: {each}")
    return key


def _median_ms(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median duration of each step in milliseconds. The steps alternate."""
    times: dict[str, list[float]] = {what: [] for what, _, _ in steps}
    for _ in range(WARM_UP + REPEATS):
        for what, read, answer in steps:
            before = time.perf_counter()
            found = read()
            times[what].append((time.perf_counter() - before) * 1000)
            if found != answer:
                raise BenchError(f"at_size: {what} found {found!r}, not {answer!r}")
    return {what: statistics.median(took[WARM_UP:]) for what, took in times.items()}
