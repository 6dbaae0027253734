"""Bugs that the tests must find. Each changes one verb of the core.

A bug gets the verb and its arguments, and calls the verb as it likes. `VERBS` alone says where the
code of today has a verb, so the bugs survive when the core is rebuilt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select, update

from chaos.simulation.clock import Times
from delaytasks import Done, TaskStateError
from delaytasks.broker import link, redis_timer
from delaytasks.broker.arming import Publisher, Sender
from delaytasks.broker.redis_timer import RedisPoller
from delaytasks.callbacks import sending
from delaytasks.db import claims, database, engines, migrations, producer, sweep_queries
from delaytasks.db.claims import Claims, MysqlTexts
from delaytasks.db.database import BoundedStep, Database
from delaytasks.db.engines import Failure
from delaytasks.db.policy_rows import PausedRows, PolicyTable
from delaytasks.db.statements import NewRows
from delaytasks.db.sweep_queries import Leases, SweepQueries, WorkerTable
from delaytasks.db.task_rows import CancelRequests, Tasks
from delaytasks.durable_eta import messages
from delaytasks.events import Events
from delaytasks.limits.tracked_waitlists import TrackedWaitlist, TrackedWaitlists
from delaytasks.model import clock, text
from delaytasks.model.policies import WAITLIST_RECHECK_S
from delaytasks.operate.checks import StartChecks
from delaytasks.recurring import creation, recurring
from delaytasks.recurring.creation import RecurringTable
from delaytasks.run import celery_context, chunk
from delaytasks.run.calls import Calls, TaskRun, WorkerMemory
from delaytasks.run.chunk import Chunk, TimeBudget
from delaytasks.run.runner import FailureReason
from delaytasks.worker import quick_loops
from delaytasks.worker.dispatcher import Dispatcher, QueueDrain, ReadyEntries
from delaytasks.worker.pool import ChunkRequest
from delaytasks.worker.sweep import Sweeper, SweepLoop
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.world import Claimed, Recovered, Settlement

#: Where the code of today has each verb.
VERBS: dict[str, tuple[Any, str]] = {
    "insert": (NewRows, "insert"),
    "insert keyed": (Tasks, "insert_keyed"),
    "cancel": (Tasks, "cancel"),
    "reschedule": (Tasks, "reschedule"),
    "touch": (Tasks, "touch"),
    "claim": (Claims, "claim"),
    "claim recovered": (Claims, "claim_recovered"),
    "run": (Calls, "run"),
    "give back": (Chunk, "give_back"),
    "settle": (Claims, "settle"),
    "complete": (Claims, "complete"),
    "renew": (Leases, "renew"),
    "tell of a renewal": (WorkerMemory, "record_renewal"),
    "release": (Leases, "recover_dead"),
    "recover": (Leases, "recover"),
    "sweep": (Sweeper, "sweep"),
    "begin a sweep": (SweepQueries, "begin_sweep"),
    "ask to stop": (CancelRequests, "make"),
    "hold": (PausedRows, "hold_claimed"),
    "store a text": (text, "storable"),
    "read the clock of the database": (Times, "_strftime"),
    "pass on": (RedisPoller, "_pass_on"),
    "receive notices": (RedisPoller, "_receive"),
    "find live tasks of schedules": (RecurringTable, "live"),
    "plan a visit": (creation, "plan"),
    "make the first tasks": (recurring.Change, "with_first_tasks"),
    "cancel the tasks of a schedule": (recurring.Change, "cancel_waiting"),
    "find a durable task": (Tasks, "celery_rows"),
    "find the task of a key": (Tasks, "ids_of_keys"),
    "arm after a call": (producer, "_without_errors"),
    "send to the broker": (Publisher, "send"),
    "wait for the sender": (Sender, "arm"),
    "connect to the broker": (link, "bounded_connection"),
    "check headers": (link, "check_headers"),
    "check the horizon": (StartChecks, "_check_visibility"),
    "tell": (Events, "emit"),
    "find the primary": (redis_timer, "redis_location"),
    "continue a backlog": (Claims, "_claim_level"),
    "read the time once": (claims.ClaimTexts, "oldest"),
    "find lost leases by an index": (sweep_queries, "is_rare"),
    "look before a run": (Calls, "not_now"),
    "judge an outcome": (TaskRun, "settlement"),
    "keep a time limit": (celery_context, "limited"),
    "keep a time budget": (TimeBudget, "open"),
    "know the processes": (quick_loops, "running_pids"),
    "know the time that a lease has left": (TaskRun, "lease_left_s"),
    "read the clock of the host": (clock, "monotonic"),
    "settle again": (chunk, "is_locked"),
    "repeat a transaction": (Database, "repeat"),
    "cut a silent connection": (BoundedStep, "cut"),
    "judge a full database": (Failure, "caused"),
    "judge a login": (engines, "_is_connecting"),
    "judge a failed chunk": (FailureReason, "of"),
    "translate an error": (database, "translate"),
    "connect to the database": (database, "make_engine"),
    "migrate alone": (migrations, "_alone_on_postgresql"),
    "time a callback": (sending, "time_left_s"),
    "read an instant": (producer, "check_instant"),
    "expire workers": (WorkerTable, "expire"),
    "note a failure of the database": (quick_loops.DatabaseContact, "mark_failed"),
    "walk through the queues": (SweepQueries, "next_queues"),
    "read without a broker": (SweepQueries, "first_due_between"),
    "sweep without beat": (SweepLoop, "_sweep_stale"),
    "drain the own queues": (SweepLoop, "drain_own_queues"),
    "send back": (WorkerRuntime, "send_back"),
    "close": (Dispatcher, "close"),
    "ask others to help": (Dispatcher, "left_to_table"),
    "take a turn for a backlog": (Dispatcher, "_drain_chunk"),
    "share the entries": (Dispatcher, "_entry_chunk"),
    "plan a look": (Dispatcher, "_plan_look"),
    "know late entries": (ReadyEntries, "levels_before"),
    "go on after a chunk": (Dispatcher, "_continue_after"),
    "want another chunk": (QueueDrain, "wants_chunk"),
    "probe a waitlist": (TrackedWaitlist, "needs_process"),
    "learn from a probe": (TrackedWaitlist, "probed"),
    "follow a limit": (TrackedWaitlists, "limits_changed"),
    "change a policy": (PolicyTable, "set"),
}


class Bug(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], object]
    #: The violations of which a simulation reports one, or a file of tests of which one fails:
    #: `conformance/keys` is tests/conformance/test_keys.py, and words of a test may follow.
    found_as: tuple[str, ...]
    #: The database of these tests.
    on: str = "sqlite"


#: Every bug, by its name.
BUGS: dict[str, Bug] = {}


def _list(
    name: str, verb: str, change: Callable[..., Any], *found: str, on: str = "sqlite"
) -> None:
    place, attribute = VERBS[verb]
    real = getattr(place, attribute)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(place, attribute, lambda *args, **options: change(real, *args, **options))

    BUGS[name] = Bug(plant, found, on)


def bug(verb: str, *found: str, on: str = "sqlite") -> Callable[[Callable[..., Any]], Any]:
    """List a bug of this verb, with the name of the function."""
    return lambda change: _list(change.__name__, verb, change, *found, on=on)


#: Verbs that do nothing, and give the same answer to every caller.
for _name, _verb, _answer, *_found in [
    ("acknowledged_before_it_is_written", "insert", True, "lost"),
    ("a_timeout_is_not_postponed", "touch", True, "conformance/deferrals"),
    ("leases_are_not_renewed", "renew", 0, "duplicated"),
    ("lost_leases_are_not_found", "recover", Recovered(0, []), "stuck"),
    ("a_completed_task_runs_again", "complete", True, "conformance/outcomes"),
    ("rows_of_a_dead_process_wait_for_a_sweep", "release", Recovered(0, []), "conformance/leases"),
    ("no_sweep", "sweep", True, "stuck"),
    ("every_sweep_was_just_made", "begin a sweep", None, "stuck"),
    ("late_entries_wait_for_a_busy_pool", "know late entries", [], "reliability/dispatching"),
    ("the_dispatcher_looks_only_when_it_is_told", "plan a look", None, "reliability/dispatching"),
    ("nobody_sweeps_without_beat", "sweep without beat", None, "unit/sweeper"),
    ("running_tasks_are_not_asked_to_stop", "ask to stop", True, "conformance/cancel"),
    ("paused_rows_are_not_held", "hold", set(), "conformance/policies"),
    ("notices_are_not_received", "receive notices", None, "late"),
    ("tasks_of_a_schedule_may_overlap", "find live tasks of schedules", set(), "overlapped"),
    (
        "a_paused_schedule_runs",
        "cancel the tasks of a schedule",
        [],
        "conformance/recurring paused",
    ),
    ("a_revoke_changes_no_row", "find a durable task", [], "revoked"),
    ("a_worker_without_a_broker_runs_nothing", "read without a broker", [], "unit/sweeper"),
    ("a_worker_without_a_broker_drains_nothing", "drain the own queues", None, "unit/sweeper"),
    ("a_stopped_worker_keeps_what_it_receives", "send back", None, "unit/runtime stopped_worker"),
    ("rows_behind_a_slow_one_wait_for_it", "keep a time budget", None, "unit/runner budget_rows"),
    ("any_horizon_is_accepted", "check the horizon", None, "integration/instances"),
    ("a_refused_login_is_no_outage", "judge a login", False, "conformance/outages connecting"),
    ("every_failure_is_an_outage", "judge a failed chunk", FailureReason.UNAVAILABLE, "unit/core"),
    ("an_outage_makes_workers_lost", "note a failure of the database", None, "unit/rules a_gap"),
    ("a_higher_limit_waits_for_probes", "follow a limit", None, "unit/dispatcher raised_limit"),
    ("answers_may_last_forever", "time a callback", 1e6, "integration/http_callbacks body"),
    ("a_locked_row_holds_up_the_others", "settle again", False, "conformance/claims left_locked"),
]:
    _list(_name, _verb, lambda *_, answer=_answer, **__: answer, *_found)


# -- schedule -------------------------------------------------------------------------------------


@bug("insert", "conformance/transactions")
def written_outside_the_callers_transaction(insert: Any, at: Any, task: Any, on: Any = None) -> Any:
    return insert(at, task)


@bug("insert keyed", "conformance/keys")
def a_key_has_many_tasks(insert_keyed: Any, at: Any, task: Any, *_: Any, **options: Any) -> Any:
    at.new.insert(task, options.get("on"))
    return task, True


@bug("cancel", "unexpected")
def cancelled_tasks_run(cancel: Any, at: Any, id: int, *_: Any, **options: Any) -> Any:
    return at.get(id)


@bug("reschedule", "early")
def rescheduled_tasks_keep_their_time(_: Any, at: Any, id: int, due: Any, *more: Any) -> Any:
    return replace(at.read(id), expected_time=due)


@bug("find the task of a key", "conformance/cancel", on="mariadb")
def a_key_is_read_as_the_transaction_began(
    find: Any, at: Any, tag: str, keys: Any, on: Any = None, *_: Any, **__: Any
) -> Any:
    return find(at, tag, keys, on)


@bug("arm after a call", "conformance/transactions error_of_the_timer")
def an_error_of_arming_reaches_the_caller(_: Any, call: Any, entries: Any) -> None:
    call(entries)


@bug("read an instant", "conformance/times")
def local_times_are_taken_for_utc(_: Any, at: Any) -> Any:
    return at.replace(tzinfo=clock.UTC)


# -- claim and run --------------------------------------------------------------------------------


@bug("claim", "duplicated")
def a_named_row_is_claimed_twice(claim: Any, at: Any, entries: Any) -> Claimed:
    found: Claimed = claim(at, entries)
    found.extend(found[:])
    return found


@bug("claim recovered", "conformance/claims")
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


@bug("continue a backlog", "conformance/claims")
def each_chunk_begins_at_the_oldest_entry(
    _: Any, at: Any, queue: str, priority: int, limit: int
) -> Any:
    return at._claim_oldest(queue, priority, limit)


@bug("read the time once", "conformance/query_plans", on="postgresql")
def claims_read_rows_that_are_not_due(oldest: Any, texts: Any, shown: str) -> str:
    return str(oldest(texts, shown)).replace(f"(SELECT {texts.now})", texts.now)


@bug("look before a run", "conformance/durable_eta")
def a_request_to_stop_ends_with_its_run(look: Any, at: Any, processor: Any, task: Any) -> Any:
    return look(at, processor, replace(task, cancel_request=None))


@bug("judge an outcome", "unit/processors")
def a_task_whose_code_has_not_run_is_done(judge: Any, *args: Any) -> Any:
    *run, value, error = args
    return judge(*run, None if isinstance(value, Iterator) else value, error)


@bug("keep a time limit", "unit/time_limits ends_with")
def time_limits_are_not_kept(_: Any, processor: Any, call: Any) -> Any:
    return call()


# -- settle ---------------------------------------------------------------------------------------


@bug("settle", "conformance/settlements without_its_lease")
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


@bug("settle", "conformance/outcomes")
def a_retry_is_a_failure(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ends = [
        one._replace(move="fail") if one.move == "schedule_retry" else one for one in settlements
    ]
    return settle(at, ends, on)


@bug("settle", "conformance/outcomes")
def a_retry_is_at_once(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ends = [
        one._replace(expected_time=one.task.expected_time) if one.move == "schedule_retry" else one
        for one in settlements
    ]
    return settle(at, ends, on)


@bug("store a text", "duplicated")
def errors_are_stored_as_they_are(storable: Any, raw: str, *_: Any) -> str:
    return raw


@bug("settle", "conformance/deferrals")
def a_task_without_a_processor_fails(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    return settle(
        at, [one._replace(move="fail") if one.due_time else one for one in settlements], on
    )


@bug("settle", "conformance/deferrals")
def a_deferred_task_is_due_at_its_next_try(
    settle: Any, at: Any, settlements: Any, on: Any = None
) -> Any:
    return settle(at, [one._replace(due_time=None) for one in settlements], on)


@bug("settle", "unit/runner")
def a_deferral_counts_from_the_creation(
    settle: Any, at: Any, settlements: Any, on: Any = None
) -> Any:
    def later(one: Any) -> Any:
        age = one.task.due - one.task.create_time
        return one._replace(expected_time=one.expected_time + age / 10) if one.due_time else one

    return settle(at, [*map(later, settlements)], on)


@bug("settle", "unit/runner")
def rows_are_not_given_back(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ended = [one for one in settlements if one.move != "give_back"]
    return settle(at, ended, on) | {one.task.id for one in settlements}


@bug("tell", "unit/runner")
def a_settlement_waits_in_silence(tell: Any, at: Any, name: str, /, **fields: Any) -> None:
    if name != "settle.waits":
        tell(at, name, **fields)


@bug("repeat a transaction", "unit/core outcome")
def conflicts_are_not_tried_again(
    repeat: Any, at: Any, work: Any, connect: Any, id: Any = None, *_: Any, **__: Any
) -> Any:
    return repeat(at, work, connect, id, 1)


@bug("judge a full database", "unit/core cannot_work")
def a_full_database_is_no_outage(caused: Any, failure: Failure, error: Any) -> bool:
    return failure is not engines.UNABLE and bool(caused(failure, error))


@bug("translate an error", "unit/core outcome")
def an_unknown_outcome_is_an_outage(translate: Any, error: Any, id: Any, *more: Any) -> Any:
    return translate(error, None, *more)


@bug("cut a silent connection", "conformance/outages falls_silent", on="postgresql")
def a_silent_server_holds_calls_for_ever(*_: Any) -> None: ...


@bug("connect to the database", "reliability/faults slow_database", on="postgresql")
def all_callers_share_one_connection(make: Any, url: Any, pool_size: int, *more: Any) -> Any:
    made = make(url, 1, *more)
    made.pool._max_overflow = 0
    return made


@bug("migrate alone", "migration/migrations long_transaction", on="postgresql")
@contextmanager
def a_migration_waits_as_long_for_a_lock_as_for_its_turn(
    alone: Any, on: Any, *args: Any
) -> Iterator[None]:
    with alone(on, *args):
        on.exec_driver_sql(f"SET LOCAL lock_timeout = '{migrations._TURN_S}s'")
        yield


# -- leases and sweeps ----------------------------------------------------------------------------


@bug("tell of a renewal", "failed")
def leases_are_renewed_with_an_error(tell: Any, *_: Any) -> None:
    raise AttributeError


@bug("recover", "too often")
def lost_leases_are_not_counted(recover: Any, at: Any, most: int, *args: Any) -> Any:
    return recover(at, 1000, *args)


@bug("release", "two leases")
def the_rows_of_living_workers_are_released(
    release: Any, at: Any, workers: Sequence[str], *args: Any, **options: Any
) -> Any:
    all = [f"w{number}/{pid}" for number in range(9) for pid in range(10_000_000, 10_000_050)]
    return release(at, [*workers, *all], *args, **options)


@bug("renew", "conformance/leases", on="postgresql")
def a_locked_row_is_not_renewed(renew: Any, *args: Any) -> Any:
    return renew(*args)._replace(skipped=())


@bug("renew", "conformance/leases")
def rows_that_were_lost_on_the_way_are_renewed(renew: Any, at: Any, workers: Any, *_: Any) -> Any:
    return renew(at, workers, clock.EPOCH)


@bug("know the time that a lease has left", "conformance/leases")
def a_lease_never_ends(left_s: Any, at: Any) -> float:
    return inf


@bug("sweep without beat", "unit/sweeper missed_only")
def beat_is_missed_after_each_outage(sweep: Any, at: Any) -> None:
    at._contact.__dict__["_since"] = -inf
    at._contact.__dict__["_answered_at"] = clock.monotonic()
    sweep(at)


@bug("know the processes", "conformance/leases replaces")
def a_process_that_is_being_replaced_stops_renewals(_: Any, pool: Any) -> set[int]:
    return set(pool.info["processes"])


@bug("read the clock of the host", "unit/core suspension")
def a_suspended_host_keeps_its_leases(_: Any) -> float:
    return monotonic()


@bug("find lost leases by an index", "conformance/query_plans")
def all_rows_are_read_for_lost_leases(_: Any, condition: Any) -> Any:
    return condition


@bug("begin a sweep", "conformance/sweep")
def two_beats_sweep_twice(begin: Any, at: Any, partition: int, partitions: int, _: float) -> Any:
    return begin(at, partition, partitions, -1)


@bug("begin a sweep", "conformance/sweep")
def rows_armed_before_the_clock_was_set_back_are_forgotten(begin: Any, at: Any, *args: Any) -> Any:
    since = begin(at, *args)
    if since is not None:
        at.__dict__["latest"] = since = max(since, at.__dict__.get("latest", since))
    return since


@bug("walk through the queues", "conformance/sweep")
def a_sweep_looks_at_all_queues(walk: Any, at: Any, after: Any, most: int) -> Any:
    return walk(at, after, 1_000_000)


@bug("expire workers", "conformance/leases")
def workers_of_the_future_live_on(expire: Any, at: Any, silent_s: float) -> Any:
    now = at._db.now()
    late = update(at._w).where(at._w.c.seen_at > now).values(seen_at=now)
    at._db.autocommitted(lambda c: c.execute(late))
    return expire(at, silent_s)


@bug("read the clock of the database", "early")
def the_workers_clock_decides(strftime: Any, times: Times, *words: str) -> Any:
    true_us, times.now_us = times.now_us, times.now_us + times.skew_us()
    try:
        return strftime(times, *words)
    finally:
        times.now_us = true_us


# -- the worker and its broker --------------------------------------------------------------------


@bug("ask others to help", "unit/dispatcher")
def other_workers_help_after_the_next_sweep(take: Any, at: Any) -> Any:
    list(take(at))
    return []


@bug("close", "unit/dispatcher early_entries")
def a_dispatcher_closes_while_entries_are_held(close: Any, at: Any) -> Any:
    lock, at._lock = at._lock, nullcontext()
    try:
        return close(at)
    finally:
        at._lock = lock


@bug("take a turn for a backlog", "reliability/dispatching")
def fresh_tasks_starve_a_backlog(turn: Any, at: Any, *args: Any) -> Any:
    return None if at.waiting else turn(at, *args)


@bug("go on after a chunk", "unit/dispatcher")
def entries_of_drained_rows_are_kept(verb: Any, queue: Any, request: Any, report: Any) -> Any:
    return verb(queue, request, report._replace(drained={}))


@bug("go on after a chunk", "unit/dispatcher drain_has_claimed")
def entries_of_rows_given_back_are_dropped(verb: Any, queue: Any, request: Any, to: Any) -> Any:
    drained = dict.fromkeys(to.drained, 1 << 63)
    return verb(queue, request, to._replace(drained=drained))


@bug("share the entries", "reliability/dispatching")
def one_process_gets_all_entries(_: Any, at: Any, number: int, size: int) -> Any:
    return ChunkRequest(tuple(at._ready.pop(size)), number=number) if at._ready else None


@bug("want another chunk", "reliability/dispatching")
def quick_tasks_wait_behind_a_slow_one(_: Any, at: Any) -> bool:
    return at.is_deep or not at.chunks


@bug("wait for the sender", "unit/background")
def a_time_limit_is_a_failure_of_the_broker(send: Any, *args: Any) -> bool:
    try:
        return bool(send(*args))
    except Exception:
        return False


@bug("send to the broker", "unit/broker")
def a_refused_queue_is_tried_each_time(send: Any, at: Any, *args: Any) -> bool:
    at._refused.clear()
    return bool(send(at, *args))


@bug("connect to the broker", "unit/rules confirmation")
def a_confirmation_may_take_any_time(connect: Any, *args: Any, **options: Any) -> Any:
    made = connect(*args, **options)
    made.transport_options.pop("read_timeout", None)
    return made


@bug("check headers", "integration/publisher headers")
def headers_of_any_size_are_sent(_: Any, *args: Any) -> None: ...


@bug("find the primary", "unit/core the_redis_is")
def only_the_first_redis_is_asked(find: Any, *args: Any) -> Any:
    found = find(*args)
    return found._replace(urls=found.urls[:1])


# -- operators ------------------------------------------------------------------------------------


@bug("ask to stop", "conformance/cancel")
def a_request_to_stop_may_come_too_late(make: Any, at: Any, on: Any, task: Any) -> bool:
    if not make(at, on, task):
        raise TaskStateError("too late", task.id, task.status)
    return True


@bug("change a policy", "conformance/policies")
def a_later_pause_is_shorter(change: Any, at: Any, kind: str, name: str, to: Any, by: str) -> Any:
    if to.get("paused_until"):
        change(at, kind, name, {"is_paused": False, "paused_until": None}, by)
    return change(at, kind, name, to, by)


@bug("probe a waitlist", "reliability/dispatching")
def a_higher_limit_waits_for_long_rows(needs: Any, at: Any, now: float) -> bool:
    return bool(at.wanted) if at.serving else needs(at, now)


@bug("learn from a probe", "unit/dispatcher pace_of_a_raised_rate")
def probes_do_not_come_at_the_pace_of_a_rate(probed: Any, at: Any, state: Any) -> None:
    probed(at, state._replace(recheck_s=WAITLIST_RECHECK_S))


# -- the Redis timer ------------------------------------------------------------------------------


@bug("pass on", "left in Redis")
def passed_on_entries_are_not_deleted(pass_on: Any, poller: Any, taken: Any) -> None:
    pass_on(poller, taken)
    poller._passed_on = []


# -- recurring schedules and durable Celery tasks -------------------------------------------------


@bug("plan a visit", "left out")
def the_first_task_of_a_visit_is_forgotten(plan: Any, *args: Any) -> Any:
    planned = plan(*args)
    return planned._replace(times=planned.times[1:] or planned.times)


@bug("make the first tasks", "conformance/recurring another")
def the_first_occurrences_wait_for_a_sweep(_: Any, at: Any, schedule: Any) -> Any:
    return schedule


class _Published(Done):
    """Takes the place of the outcome that defers a message."""

    def __init__(self, _after: Any) -> None:
        super().__init__()


def _claim_whatever_the_status(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Claims, entries: Any) -> Claimed:
        named = self._t.c.id.in_([entry.id for entry in entries])
        tasks = self._tasks(self._db.rows(select(*self.columns).where(named)))
        self._db.autocommitted(lambda c: self._claim_locked(c, tasks))
        return Claimed(tasks)

    patch.setattr(Claims, "claim", claim)


def _advance_no_schedule(patch: pytest.MonkeyPatch) -> None:
    """Nor does the key of a task keep another one from the same occurrence."""
    patch.setattr(RecurringTable, "advance", lambda *_: None)
    patch.setattr(RecurringTable, "take_keys", lambda _, on, tasks: {task.id for task in tasks})


BUGS["old_messages_claim_rows"] = Bug(_claim_whatever_the_status, ("illegal move",))
BUGS["claims_lock_rows_of_other_queues"] = Bug(
    lambda patch: patch.setattr(MysqlTexts, "use_index", lambda *_: ""),
    ("conformance/query_plans",),
    on="mariadb",
)
BUGS["unconfirmed_messages_count_as_published"] = Bug(
    lambda patch: patch.setattr(messages, "Snooze", _Published), ("lost",)
)
BUGS["schedules_are_not_advanced_with_their_tasks"] = Bug(_advance_no_schedule, ("repeated",))
BUGS["entries_of_a_dead_poller_never_return"] = Bug(
    lambda patch: patch.setattr(redis_timer, "TICKETS_MS", 1e12), ("property/redis_timer",)
)


def pytest_configure() -> None:
    """As a plugin, plant the bug that the environment names."""
    BUGS[os.environ["PLANTED_BUG"]].plant(pytest.MonkeyPatch())
