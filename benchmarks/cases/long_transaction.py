"""Claims while another transaction stays open, so that the database cannot remove dead rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import func, select

from benchmarks import ours, table
from benchmarks.figures import Target, percentile
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks.db.claims import Claims
from delaytasks.db.store import Store
from delaytasks.model.clock import IdMaker, wall_ms
from delaytasks.model.task import DelayedTask, Entry, Settlement

CHUNK = 50
PREFIX = "bench_long_"
#: The share at the end of each phase that is measured, when most dead rows exist.
LAST = 0.25
_make_id = IdMaker(wall_ms)


def run(stage: CaseContext) -> None:
    rounds = stage.size(3000, 400)
    with table.other_tables(PREFIX) as store:
        before = _claims(store, rounds)
        with _open_transaction(store):
            during = _claims(store, rounds)
    rows = 2 * rounds * CHUNK
    for what, without in before.items():
        name = f"{what} of {CHUNK}, p99, {rows:,} rows during an open transaction"
        figure = stage.figure(
            "long_transaction", name, "ms", Target("ratio", most=3), against="without one:"
        )
        figure.add(percentile(during[what], 0.99), percentile(without, 0.99))
        stage.say(
            f"long_transaction: {what} p50 {percentile(during[what], 0.5):.2f} ms, p99 "
            f"{percentile(during[what], 0.99):.2f} ms; without one {percentile(without, 0.5):.2f} "
            "and "
            f"{percentile(without, 0.99):.2f} ms"
        )


@contextmanager
def _open_transaction(store: Store) -> Iterator[None]:
    """Hold a transaction open that has read the table, as a report does."""
    engine = store.database.tx.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        connection.execute(select(func.count()).select_from(store.schema.tasks)).scalar()
        yield


def _claims(store: Store, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each claim in the last part of the rounds.

    Claimed rows are settled.
    """
    claims = store.claims("bench", None)
    found: dict[str, list[float]] = {"claim by id": [], "claim_due": []}
    for number in range(rounds):
        entries = [Entry.of(one) for one in schedule(store, CHUNK)]
        schedule(store, CHUNK)
        for what, claim in (
            ("claim by id", partial(claims.claim, entries)),
            ("claim_due", partial(claims.claim_due, "default", [0], CHUNK)),
        ):
            began = time.perf_counter()
            claimed = claim()
            took_ms = (time.perf_counter() - began) * 1000
            settle(claims, claimed, CHUNK)
            if number >= rounds * (1 - LAST):
                found[what].append(took_ms)
    return found


def schedule(store: Store, count: int) -> list[DelayedTask]:
    now = store.tasks.now()
    tasks = [DelayedTask(_make_id(), ours.TAG, "{}", now, create_time=now) for _ in range(count)]
    store.tasks.new.insert_many(tasks)
    return tasks


def settle(claims: Claims, claimed: list[DelayedTask], count: int) -> None:
    if len(claims.settle([Settlement(one, "succeed") for one in claimed])) != count:
        raise BenchError(f"a chunk of {count} was claimed or settled only in part")
