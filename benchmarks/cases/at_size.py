"""The costs of sweeps, claim queries, chunks and searches in a large and in a small table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from benchmarks import ours, table
from benchmarks.figures import Target
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask, Entry, Settlement
from delaytasks.operate.state_queries import Stats
from delaytasks.runtime import runtime_of
from delaytasks.worker.sweep import PURGE_ROWS, RECOVER_ROWS

#: The numbers of waiting rows. The smallest comes first and is the base of the comparison.
PENDING = (10_000, 1_000_000, 10_000_000)
QUICK = (10_000, 200_000)
#: Finished rows per waiting row.
FINISHED = 5
#: The same in all tables, since a query costs more if it finds more rows.
NEAR, OVERDUE, RUNNING, FAILED = 2000, 5000, 200, 200
CLAIMED, PAGE = 200, 100
WARM_UP, REPEATS = 3, 15
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
#: The name of a query, the query, and its expected answer.
Step = tuple[str, Callable[[], object], object]


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("at_size: skipped, since only PostgreSQL creates these rows within minutes")
        return
    sizes = QUICK if stage.is_quick else PENDING
    small = _measure(stage, sizes[0])
    for pending in sizes[1:]:
        for what, ms in _measure(stage, pending).items():
            target = Target("ratio", most=3)
            figure = stage.figure(
                "at_size", f"{what}; {pending:,} wait", "ms", target, against=f"{sizes[0]:,}:"
            )
            figure.add(ms, small[what])
    table.clear()


def _measure(stage: CaseContext, pending: int) -> dict[str, float]:
    """Return the median duration of each query in milliseconds."""
    key = _fill(stage, pending)
    found: dict[str, float] = {}
    for step in _sweeps() + _searches(key):
        found |= _median_ms([step])
    found |= _median_ms(_chunk())
    stage.say(
        f"at_size: {pending:,} wait: "
        f"{', '.join(f'{what} {ms:.2f} ms' for what, ms in found.items())}"
    )
    return found


def _sweeps() -> list[Step]:
    """Return the queries of sweeps and of drains."""
    runtime, settings = runtime_of(ours.delays), ours.delays.settings
    sweeps, leases = runtime.store.sweeps, runtime.store.leases
    claims = runtime.store.claims("bench", None)
    now = runtime.clock.certain_now()
    until = now + timedelta(seconds=HOUR_S)
    queue = settings.default_queue
    return [
        ("begin_sweep", lambda: sweeps.begin_sweep(0, 1, 0.0) is not None, True),
        (
            "stale_sweep_partitions",
            lambda: sweeps.stale_sweep_partitions(1, settings.self_sweep_s),
            [],
        ),
        (f"near, {NEAR:,} rows", lambda: sum(map(len, sweeps.due_between(now, until, 0, 1))), NEAR),
        ("priorities, one overdue", lambda: len(sweeps.levels(settings.grace_s)), 1),
        ("priorities, none overdue", lambda: sweeps.levels(DAY_S), []),
        (
            "recover, none",
            lambda: leases.recover(settings.max_lost_leases, RECOVER_ROWS, settings.lost_s).total,
            0,
        ),
        ("purge, no old rows", lambda: sweeps.purge(30 * DAY_S, PURGE_ROWS), 0),
        (f"claim_due of {CLAIMED}", lambda: len(claims.claim_due(queue, [0], CLAIMED)), CLAIMED),
        ("claim_recovered, no rows", lambda: claims.claim_recovered(queue, [0]), None),
    ]


def _searches(key: str) -> list[Step]:
    """Return the queries of the command line and of dashboards."""
    delays, store = ours.delays, runtime_of(ours.delays).store

    def page(**by: Any) -> int:
        return len(delays.find(**by, limit=PAGE).tasks)

    return [
        ("find, a page", page, PAGE),
        ("find NOT_COMPLETE, a page", lambda: page(status=Status.NOT_COMPLETE), PAGE),
        ("find DONE, a page", lambda: page(status=Status.DONE), PAGE),
        ("find FAILED, a page", lambda: page(status=Status.FAILED), PAGE),
        ("find by key", lambda: page(key=key), 1),
        ("get by tag and key", lambda: delays.get(tag=ours.TAG, key=key).key, key),
        ("counts", lambda: len(Stats(store.database, store.schema).counts()), len(Status)),
    ]


def _chunk() -> list[Step]:
    """Return the statements of one chunk, each of which needs the one before it."""
    runtime = runtime_of(ours.delays)
    tasks, claims = runtime.store.tasks, runtime.store.claims("bench", None)
    now = runtime.clock.certain_now()
    chunk: list[DelayedTask] = []

    def insert() -> int:
        chunk[:] = [
            DelayedTask(ours.delays.new_id(), ours.TAG, "{}", now, create_time=now)
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


def _fill(stage: CaseContext, pending: int) -> str:
    """Fill the table, and return the key of a waiting task."""
    table.clear()
    table.forget_sweeps()
    before = time.monotonic()
    with table.indexed_at_the_end():
        table.fill(FINISHED * pending, Status.DONE, -7 * DAY_S, -HOUR_S, is_keyed=True)
        table.fill(FAILED, Status.FAILED, -7 * DAY_S, -HOUR_S)
        table.fill(
            pending - NEAR - OVERDUE, Status.NOT_COMPLETE, 2 * HOUR_S, 7 * DAY_S, is_keyed=True
        )
    table.fill(OVERDUE, Status.NOT_COMPLETE, -HOUR_S, -MINUTE_S)
    table.fill(RUNNING, Status.RUNNING, -MINUTE_S, 0)
    key = table.take_keys()
    inserted = time.monotonic()
    table.settle_down()
    # The near rows are inserted last, so that they are still near when they are read.
    table.fill(NEAR, Status.NOT_COMPLETE, 10 * MINUTE_S, 11 * MINUTE_S)
    rows = (FINISHED + 1) * pending
    each = ", ".join(f"{name} {size / rows:.0f}" for name, size in table.sizes())
    stage.say(
        f"at_size: {pending:,} wait and {FINISHED * pending:,} are finished, bytes a row: {each}; "
        f"inserted in {inserted - before:.0f} s; vacuum, analyse and checkpoint took "
        f"{time.monotonic() - inserted:.0f} s"
    )
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
