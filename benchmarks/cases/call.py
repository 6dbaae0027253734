"""The duration of one call of `schedule_delay`.

In its own transaction it is compared with `apply_async(eta=…)`, in the caller's transaction with
the caller's own INSERT.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any

from benchmarks import bare, brokers, ours, table
from benchmarks.figures import Target
from benchmarks.stage import CaseContext
from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of

BLOCK = 100
BEYOND_S, WITHIN_S = 3600.0, 20.0

_inline_app, _inline = ours.make("bench_inline", arm="inline")


def _schedule(delays: DelayTasks, delay: float, session: Any = None) -> Callable[[], object]:
    body = {"due": 0.5, "order": 7, "customer": "c-1234"}
    return lambda: delays.schedule_delay(ours.TAG, body, delay, session=session)


def _send() -> object:
    return bare.note_task.apply_async(
        (0.5,),
        eta=datetime.now(timezone.utc) + timedelta(seconds=WITHIN_S),  # noqa: TID251
    )


#: Each call with its target, as a multiple of apply_async.
_CALLS: list[tuple[str, Callable[[], object], float]] = [
    ("beyond the horizon", _schedule(ours.delays, BEYOND_S), 1.2),
    ("within it", _schedule(ours.delays, WITHIN_S), 1.2),
    ("due immediately", _schedule(ours.delays, 0), 1.2),
    ("within it, inline", _schedule(_inline, WITHIN_S), 2),
]


def run(stage: CaseContext) -> None:
    table.clear()
    costs = _medians(stage, {"apply_async": _send, **{name: call for name, call, _ in _CALLS}})
    for name, _, most in _CALLS:
        figure = stage.figure("call", f"schedule_delay, {name}", "µs", Target("ratio", most=most))
        figure.add(costs[name], costs["apply_async"])
    _in_the_callers_transaction(stage)
    brokers.clear()


def _in_the_callers_transaction(stage: CaseContext) -> None:
    """Schedule beyond the horizon, so that nothing has to be armed after the commit."""
    with table.own_inserts() as (session, inserts):
        ours_in_it = _schedule(ours.delays, BEYOND_S, session)
        costs = _medians(stage, {"delaytasks": ours_in_it, **inserts}, session.begin)
    for name in inserts:
        against = f"the caller's own INSERT by {name}:"
        what = f"schedule_delay, in the caller's transaction ({name})"
        figure = stage.figure("call", what, "µs", Target("ratio", most=1.2), against=against)
        figure.add(costs["delaytasks"], costs[name])


def _medians(
    stage: CaseContext,
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
                runtime_of(ours.delays).flush()
                if number:
                    costs[name] += took
    return {name: statistics.median(took) for name, took in costs.items()}


def _timed(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return (time.perf_counter() - before) * 1e6
