"""The duration of one call of `schedule_delay`, and the memory of a long `schedule_many`.

In its own transaction a call is compared with `apply_async(eta=…)`, in the caller's transaction
with the caller's own INSERT.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks import ours
from benchmarks.run import Stage
from benchmarks.side import Figures, Side
from benchmarks.waiting import instant, wall
from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of

BLOCK = 100
BEYOND_S, WITHIN_S = 3600.0, 20.0
#: After this number of rows, the process has allocated its working memory.
WARM = 100_000


def call(stage: Stage, side: Side) -> Figures:
    from benchmarks import bare

    def send() -> object:
        return bare.note_task.apply_async((0.5,), eta=instant(wall() + WITHIN_S))

    with side.prepared():
        delays, inline = side.delays, ours.make(arm="inline")[1]
        own = {
            "beyond the horizon": _schedule(delays, BEYOND_S),
            "within it": _schedule(delays, WITHIN_S),
            "due immediately": _schedule(delays, 0),
            "within it, inline": _schedule(inline, WITHIN_S),
        }
        costs = _medians(stage, delays, {**own, "apply_async": send})
        base = costs.pop("apply_async")
        found = {"apply_async, µs": base}
        for name, cost in costs.items():
            found[f"schedule_delay, {name}, µs"] = cost
            found[f"{name}, x apply_async"] = cost / base
        # Beyond the horizon, nothing has to be armed after the commit.
        with side.rows.own_inserts() as (session, inserts):
            in_it = {"delaytasks": _schedule(delays, BEYOND_S, session), **inserts}
            costs = _medians(stage, delays, in_it, session.begin)
        for name in inserts:
            what = f"in the caller's transaction ({name})"
            found[f"schedule_delay, {what}, µs"] = costs["delaytasks"]
            found[f"{what}, x the caller's INSERT"] = costs["delaytasks"] / costs[name]
        inline.close()
    return found


def _schedule(delays: DelayTasks, delay: float, session: Any = None) -> Callable[[], object]:
    body = {"due": 0.5, "order": 7, "customer": "c-1234"}
    return lambda: delays.schedule_delay(ours.TAG, body, delay, session=session)


def _medians(
    stage: Stage,
    delays: DelayTasks,
    calls: Mapping[str, Callable[[], object]],
    block: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, float]:
    """Measure blocks of calls in turn, so that a slow period affects all of them.

    The first block warms up.
    """
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(stage.size(15, 5) + 1):
        with block():
            for name, call in calls.items():
                took = [_timed(call) for _ in range(BLOCK)]
                runtime_of(delays).flush()
                if number:
                    costs[name] += took
    return {name: statistics.median(took) for name, took in costs.items()}


def _timed(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return (time.perf_counter() - before) * 1e6


def stream(stage: Stage, side: Side) -> Figures:
    """Schedule the rows of a generator, also in one transaction of the caller."""
    rows = stage.size(10_000_000, 400_000)
    with side.prepared(), side.rows.session() as caller:
        found = _stream(side, rows, f"schedule_many, {rows:,} rows", None)
        return found | _stream(side, rows, "the same in one transaction of the caller", caller)


def _stream(side: Side, rows: int, what: str, caller: Any) -> Figures:
    warm_mb = 0.0

    def tasks() -> Iterator[Any]:
        nonlocal warm_mb
        for number in range(rows):
            if number == WARM:
                warm_mb = _peak_mb()
            yield ours.TAG, {"due": 0.5, "order": number, "customer": "c-1234"}, 86400.0

    side.rows.clear()
    before = time.perf_counter()
    side.delays.schedule_many(tasks(), session=caller)
    if caller is not None:
        caller.commit()
    per_s = rows / (time.perf_counter() - before)
    assert side.rows.count() == rows
    grown_mb = _peak_mb() - warm_mb
    return {f"{what}, rows/s": per_s, f"{what}: peak memory above {WARM:,} rows, MB": grown_mb}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
