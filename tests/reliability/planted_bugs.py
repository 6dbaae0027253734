"""Bugs that the tests must find. Each changes one verb of the core.

A bug gets the verb and its arguments, and calls the verb as it likes. `VERBS` alone says where the
code of today has a verb, so the bugs survive when the core is rebuilt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from chaos.simulation.clock import Times
from delaytasks import Done
from delaytasks.core import text
from delaytasks.execution.chunk import Chunk
from delaytasks.execution.executor import TaskExecutor
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.operations import durable_calls
from delaytasks.recurrence import creation
from delaytasks.recurrence.creation import RecurringTable
from delaytasks.storage.claims import Claims
from delaytasks.storage.leases import CancelRequests, Leases
from delaytasks.storage.policy_rows import PausedRows
from delaytasks.storage.settlements import DeferredRows
from delaytasks.storage.sweep_queries import SweepQueries
from delaytasks.storage.task_rows import CeleryRows, Tasks, Touches
from delaytasks.timers import redis_timer
from delaytasks.worker.redis_poller import RedisPoller
from delaytasks.worker.shared_memory import Renewals
from tests.world import Claimed, Recovered, Settlement

#: Where the code of today has each verb.
VERBS: dict[str, tuple[Any, str]] = {
    "insert": (Tasks, "insert"),
    "insert keyed": (Tasks, "insert_keyed"),
    "cancel": (Tasks, "cancel"),
    "reschedule": (Tasks, "reschedule"),
    "touch": (Touches, "touch"),
    "claim": (Claims, "claim"),
    "claim recovered": (Claims, "claim_recovered"),
    "run": (TaskExecutor, "run"),
    "give back": (Chunk, "give_back"),
    "settle": (Claims, "settle"),
    "bring forward": (DeferredRows, "bring_forward"),
    "renew": (Leases, "renew"),
    "tell of a renewal": (Renewals, "record"),
    "release": (Leases, "release"),
    "recover": (SweepQueries, "recover"),
    "sweep": (Sweeper, "sweep"),
    "begin a sweep": (SweepQueries, "begin_sweep"),
    "ask to stop": (CancelRequests, "make"),
    "hold": (PausedRows, "hold"),
    "store a text": (text, "storable"),
    "read the clock of the database": (Times, "_strftime"),
    "pass on": (RedisPoller, "_pass_on"),
    "receive notices": (RedisPoller, "_receive"),
    "find live tasks of schedules": (RecurringTable, "live"),
    "plan a visit": (creation, "plan"),
    "defer a message": (durable_calls, "Snooze"),
    "find a durable task": (CeleryRows, "live"),
}


class Bug(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], object]
    #: The violations of which a simulation reports one, or a file of tests of which one fails.
    found_as: tuple[str, ...]


#: Every bug, by the name of its function.
BUGS: dict[str, Bug] = {}


def bug(verb: str, *found_as: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """List a bug of this verb."""

    def listed(change: Callable[..., Any]) -> Callable[..., Any]:
        place, name = VERBS[verb]
        real = getattr(place, name)

        def plant(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(place, name, lambda *args, **options: change(real, *args, **options))

        BUGS[change.__name__] = Bug(plant, found_as)
        return change

    return listed


# -- schedule -------------------------------------------------------------------------------------


@bug("insert", "lost")
def acknowledged_before_it_is_written(insert: Any, *_: Any) -> bool:
    return True


@bug("insert", "tests/conformance/test_transactions.py")
def written_outside_the_callers_transaction(insert: Any, at: Any, task: Any, on: Any = None) -> Any:
    return insert(at, task)


@bug("insert keyed", "tests/conformance/test_keys.py")
def a_key_has_many_tasks(insert_keyed: Any, at: Any, task: Any, *_: Any, **options: Any) -> Any:
    at.insert(task, options.get("on"))
    return task, True


@bug("cancel", "unexpected")
def cancelled_tasks_run(cancel: Any, at: Any, id: int, *_: Any, **options: Any) -> Any:
    return at.get(id)


@bug("reschedule", "early")
def rescheduled_tasks_keep_their_time(_: Any, at: Any, id: int, due: Any, *more: Any) -> Any:
    return replace(at.read(id), expected_time=due)


@bug("touch", "tests/conformance/test_deferrals.py")
def a_timeout_is_not_postponed(touch: Any, *_: Any, **options: Any) -> bool:
    return True


# -- claim and run --------------------------------------------------------------------------------


@bug("claim", "duplicated")
def a_named_row_is_claimed_twice(claim: Any, at: Any, entries: Any) -> Claimed:
    found: Claimed = claim(at, entries)
    found.extend(found[:])
    return found


@bug("claim recovered", "tests/conformance/test_claims.py")
def poison_is_claimed_with_others(_: Any, at: Any, queue: str, priorities: Any, *more: Any) -> Any:
    return at.claim_due(queue, priorities, 100)


@bug("run", "lost")
def failed_instead_of_run(run: Any, at: Any, processor: Any, tasks: Any, claimed: Any) -> Any:
    return [Settlement(task, "fail") for task in tasks]


@bug("run", "duplicated")
def processors_are_called_twice(run: Any, *args: Any) -> Any:
    run(*args)
    return run(*args)


@bug("give back", "duplicated")
def given_back_rows_run_nevertheless(give_back: Any, chunk: Any) -> int:
    waiting = chunk.waiting
    chunk.keep(Settlement(task, "give_back") for task in waiting)
    return len(waiting)


# -- settle ---------------------------------------------------------------------------------------


@bug("settle", "double finish", "illegal move", "duplicated")
def a_late_end_of_a_run_is_accepted(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    versions = {row.id: row.version for row in at.unclaimed(one.task.id for one in settlements)}
    ends = [
        one._replace(task=replace(one.task, version=versions.get(one.task.id, 0)))
        for one in settlements
    ]
    return settle(at, ends, on)


@bug("settle", "duplicated", "too often")
def ends_of_runs_are_not_written(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    return {one.task.id for one in settlements}


@bug("settle", "tests/conformance/test_outcomes.py")
def a_retry_is_a_failure(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ends = [
        one._replace(move="fail") if one.move == "schedule_retry" else one for one in settlements
    ]
    return settle(at, ends, on)


@bug("settle", "tests/conformance/test_outcomes.py")
def a_retry_is_at_once(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ends = [
        one._replace(expected_time=one.task.expected_time) if one.move == "schedule_retry" else one
        for one in settlements
    ]
    return settle(at, ends, on)


@bug("bring forward", "tests/conformance/test_deferrals.py")
def deferred_rows_wait_for_their_next_try(bring_forward: Any, *_: Any, **options: Any) -> list[Any]:
    return []


@bug("store a text", "duplicated")
def errors_are_stored_as_they_are(storable: Any, raw: str, *_: Any) -> str:
    return raw


# -- leases and sweeps ----------------------------------------------------------------------------


@bug("renew", "duplicated")
def leases_are_not_renewed(renew: Any, *_: Any) -> int:
    return 0


@bug("tell of a renewal", "failed")
def leases_are_renewed_with_an_error(tell: Any, *_: Any) -> None:
    raise AttributeError


@bug("recover", "stuck")
def lost_leases_are_not_found(recover: Any, *_: Any) -> Recovered:
    return Recovered(0, [])


@bug("recover", "too often")
def lost_leases_are_not_counted(recover: Any, at: Any, most: int, limit: int) -> Any:
    return recover(at, 1000, limit)


@bug("release", "two leases")
def the_rows_of_living_workers_are_released(
    release: Any, at: Any, workers: Sequence[str], *args: Any, **options: Any
) -> Any:
    all = [f"w{number}/{pid}" for number in range(9) for pid in range(10_000_000, 10_000_050)]
    return release(at, [*workers, *all], *args, **options)


@bug("sweep", "stuck")
def no_sweep(sweep: Any, *_: Any) -> bool:
    return True


@bug("begin a sweep", "stuck")
def every_sweep_was_just_made(begin_sweep: Any, *_: Any) -> None:
    return None


@bug("read the clock of the database", "early")
def the_workers_clock_decides(strftime: Any, times: Times, *words: str) -> Any:
    true_us, times.now_us = times.now_us, times.now_us + times.skew_us()
    try:
        return strftime(times, *words)
    finally:
        times.now_us = true_us


# -- operators ------------------------------------------------------------------------------------


@bug("ask to stop", "tests/conformance/test_cancel.py")
def running_tasks_are_not_asked_to_stop(make: Any, *_: Any) -> bool:
    return True


@bug("hold", "tests/conformance/test_policies.py")
def paused_rows_are_not_held(hold: Any, at: Any, ids: Any) -> int:
    return 0


# -- the Redis timer ------------------------------------------------------------------------------


@bug("pass on", "left in Redis")
def passed_on_entries_are_not_deleted(pass_on: Any, poller: Any, taken: Any) -> None:
    pass_on(poller, taken)
    poller._passed_on = []


@bug("receive notices", "late")
def notices_are_not_received(receive: Any, *_: Any) -> None:
    return None


# -- recurring schedules and durable Celery tasks -------------------------------------------------


@bug("find live tasks of schedules", "overlapped")
def tasks_of_a_schedule_may_overlap(live: Any, *_: Any) -> set[int]:
    return set()


@bug("plan a visit", "left out")
def the_first_task_of_a_visit_is_forgotten(plan: Any, *args: Any) -> Any:
    planned = plan(*args)
    return planned._replace(times=planned.times[1:] or planned.times)


@bug("defer a message", "lost")
def unconfirmed_messages_count_as_published(defer: Any, _: Any) -> Done:
    return Done()


@bug("find a durable task", "revoked")
def a_revoke_changes_no_row(live: Any, *_: Any) -> list[Any]:
    return []


def _claim_whatever_the_status(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Claims, entries: Any) -> Claimed:
        query, _ = self._claim_queries.named([(entry.id, entry.version) for entry in entries])
        ids = sorted({entry.id for entry in entries})
        return Claimed(self._db.autocommitted(lambda c: query.claim_locked(c, ids)))

    patch.setattr(Claims, "claim", claim)


def _advance_no_schedule(patch: pytest.MonkeyPatch) -> None:
    """Nor does the key of a task keep another one from the same occurrence."""
    patch.setattr(RecurringTable, "advance", lambda *_: None)
    patch.setattr(RecurringTable, "take_keys", lambda _, on, tasks: {task.id for task in tasks})


BUGS["old_messages_claim_rows"] = Bug(_claim_whatever_the_status, ("illegal move",))
BUGS["schedules_are_not_advanced_with_their_tasks"] = Bug(_advance_no_schedule, ("repeated",))
BUGS["entries_of_a_dead_poller_never_return"] = Bug(
    lambda patch: patch.setattr(redis_timer, "RETURN_S", 1e6), ("left in Redis",)
)


def pytest_configure() -> None:
    """As a plugin, plant the bug that the environment names."""
    BUGS[os.environ["PLANTED_BUG"]].plant(pytest.MonkeyPatch())
