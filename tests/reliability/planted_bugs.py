"""Bugs that the tests must find. Each changes one verb of the core, which is named by its place.

A bug gets the verb and its arguments, and calls the verb as it likes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from pkgutil import resolve_name
from time import monotonic
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select, update

from chaos.simulation.clock import Times
from delaytasks import Done, TaskStateError
from delaytasks.broker import redis_timer
from delaytasks.db import engines, migrations
from delaytasks.db.claims import Claims, MysqlTexts
from delaytasks.db.engines import Failure
from delaytasks.durable_eta import messages
from delaytasks.model import clock
from delaytasks.model.policies import WAITLIST_RECHECK_S
from delaytasks.recurring.creation import RecurringTable
from delaytasks.run.runner import FailureReason
from delaytasks.worker.pool import ChunkRequest
from tests.world import Claimed, Recovered, Settlement


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
    path, _, attribute = f"delaytasks.{verb}".rpartition(".")
    place = resolve_name(path)
    real = getattr(place, attribute)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(place, attribute, lambda *args, **options: change(real, *args, **options))

    BUGS[name] = Bug(plant, found, on)


def bug(verb: str, *found: str, on: str = "sqlite") -> Callable[[Callable[..., Any]], Any]:
    """List a bug of this verb, with the name of the function."""
    return lambda change: _list(change.__name__, verb, change, *found, on=on)


def ends(*found: str) -> Callable[[Callable[[Any], Any]], None]:
    """List a bug that changes each settlement."""

    def add(change: Callable[[Any], Any]) -> None:
        def settle(real: Any, at: Any, settlements: Any, on: Any = None) -> Any:
            return real(at, [*map(change, settlements)], on)

        _list(change.__name__, "db.claims.Claims.settle", settle, *found)

    return add


#: Verbs that do nothing, and give the same answer to every caller.
SAME_ANSWERS: list[Any] = [
    ("acknowledged_before_it_is_written", "db.statements.NewRows.insert", True, "lost"),
    ("a_timeout_is_not_postponed", "db.task_rows.Tasks.touch", True, "conformance/deferrals"),
    ("leases_are_not_renewed", "db.sweep_queries.Leases.renew", 0, "duplicated"),
    ("lost_leases_are_not_found", "db.sweep_queries.Leases.recover", Recovered(0, []), "stuck"),
    ("a_completed_task_runs_again", "db.claims.Claims.complete", True, "conformance/outcomes"),
    ("rows_of_a_dead_process_wait_for_a_sweep", "db.sweep_queries.Leases.recover_dead",
     Recovered(0, []), "conformance/leases"),
    ("no_sweep", "worker.sweep.Sweeper.sweep", True, "stuck"),
    ("every_sweep_was_just_made", "db.sweep_queries.SweepQueries.begin_sweep", None, "stuck"),
    ("late_entries_wait_for_a_busy_pool", "worker.dispatcher.ReadyEntries.levels_before",
     [], "reliability/dispatching"),
    ("the_dispatcher_looks_only_when_it_is_told", "worker.dispatcher.Dispatcher._plan_look",
     None, "reliability/dispatching"),
    ("nobody_sweeps_without_beat", "worker.sweep.SweepLoop._sweep_stale", None, "unit/sweeper"),
    ("running_tasks_are_not_asked_to_stop", "db.task_rows.CancelRequests.make",
     True, "conformance/cancel"),
    ("paused_rows_are_not_held", "db.policy_rows.PausedRows.hold_claimed",
     set(), "conformance/policies"),
    ("notices_are_not_received", "broker.redis_timer.RedisPoller._receive", None, "late"),
    ("tasks_of_a_schedule_may_overlap", "recurring.creation.RecurringTable.live",
     set(), "overlapped"),
    ("a_paused_schedule_runs", "recurring.recurring.Change.cancel_waiting",
     [], "conformance/recurring paused"),
    ("a_revoke_changes_no_row", "db.task_rows.Tasks.celery_rows", [], "revoked"),
    ("a_worker_without_a_broker_runs_nothing", "db.sweep_queries.SweepQueries.first_due_between",
     [], "unit/sweeper"),
    ("a_worker_without_a_broker_drains_nothing", "worker.sweep.SweepLoop.drain_own_queues",
     None, "unit/sweeper"),
    ("late_tasks_of_another_worker_wait_for_it", "broker.direct.TablePoller._drain_late_of_others",
     None, "unit/sweeper late_rows"),
    ("a_deleted_queue_stays_declared", "broker.link.BrokerLink._forget_lost_queues",
     None, "integration/publisher refuses"),
    ("a_stopped_worker_keeps_what_it_receives", "worker.worker_runtime.WorkerRuntime.send_back",
     None, "unit/runtime stopped_worker"),
    ("rows_behind_a_slow_one_wait_for_it", "run.chunk.TimeBudget.open",
     None, "unit/runner budget_rows"),
    ("any_horizon_is_accepted", "operate.checks._check_visibility",
     None, "integration/instances"),
    ("a_refused_login_is_no_outage", "db.engines._is_connecting",
     False, "conformance/outages connecting"),
    ("every_failure_is_an_outage", "run.runner.FailureReason.of",
     FailureReason.UNAVAILABLE, "unit/core"),
    ("an_outage_makes_workers_lost", "worker.quick_loops.DatabaseContact.mark_failed",
     None, "unit/rules a_gap"),
    ("a_higher_limit_waits_for_probes", "limits.tracked_waitlists.TrackedWaitlists.limits_changed",
     None, "unit/dispatcher raised_limit"),
    ("answers_may_last_forever", "callbacks.sending.time_left_s",
     1e6, "integration/callbacks body"),
    ("a_locked_row_holds_up_the_others", "run.chunk.is_locked",
     False, "conformance/claims left_locked"),
]  # fmt: skip
for _name, _verb, _answer, *_found in SAME_ANSWERS:
    _list(_name, _verb, lambda *_, answer=_answer, **__: answer, *_found)


# -- schedule -------------------------------------------------------------------------------------


@bug("db.statements.NewRows.insert", "conformance/transactions")
def written_outside_the_callers_transaction(insert: Any, at: Any, task: Any, on: Any = None) -> Any:
    return insert(at, task)


@bug("db.task_rows.Tasks.insert_keyed", "conformance/keys")
def a_key_has_many_tasks(insert_keyed: Any, at: Any, task: Any, *_: Any, **options: Any) -> Any:
    at.new.insert(task, options.get("on"))
    return task, True


@bug("db.task_rows.Tasks.cancel", "unexpected")
def cancelled_tasks_run(cancel: Any, at: Any, id: int, *_: Any, **options: Any) -> Any:
    return at.get(id)


@bug("db.task_rows.Tasks.reschedule", "early")
def rescheduled_tasks_keep_their_time(_: Any, at: Any, id: int, due: Any, *more: Any) -> Any:
    return replace(at.read(id), expected_time=due)


@bug("db.task_rows.Tasks.ids_of_keys", "conformance/cancel", on="mariadb")
def a_key_is_read_as_the_transaction_began(
    find: Any, at: Any, tag: str, keys: Any, on: Any = None, *_: Any, **__: Any
) -> Any:
    return find(at, tag, keys, on)


@bug("db.producer._without_errors", "conformance/transactions error_of_the_timer")
def an_error_of_arming_reaches_the_caller(_: Any, call: Any, entries: Any) -> None:
    call(entries)


@bug("db.producer.check_instant", "conformance/times")
def local_times_are_taken_for_utc(_: Any, at: Any) -> Any:
    return at.replace(tzinfo=clock.UTC)


# -- claim and run --------------------------------------------------------------------------------


@bug("db.claims.Claims.claim", "duplicated")
def a_named_row_is_claimed_twice(claim: Any, at: Any, entries: Any) -> Claimed:
    found: Claimed = claim(at, entries)
    found.extend(found[:])
    return found


@bug("db.claims.Claims.claim_recovered", "conformance/claims")
def poison_is_claimed_with_others(_: Any, at: Any, queue: str, priorities: Any, *more: Any) -> Any:
    return at.claim_due(queue, priorities, 100)


@bug("run.calls.Calls.run", "lost")
def failed_instead_of_run(run: Any, at: Any, processor: Any, tasks: Any, claimed: Any) -> Any:
    return [Settlement(task, "fail") for task in tasks]


@bug("run.calls.Calls.run", "duplicated")
def processors_are_called_twice(run: Any, *args: Any) -> Any:
    run(*args)
    return run(*args)


@bug("run.chunk.Chunk.give_back", "duplicated")
def given_back_rows_run_nevertheless(give_back: Any, chunk: Any) -> int:
    waiting = chunk.waiting
    chunk.keep(Settlement(task, "give_back") for task in waiting)
    return len(waiting)


@bug("db.claims.Claims._claim_level", "conformance/claims")
def each_chunk_begins_at_the_oldest_entry(
    _: Any, at: Any, queue: str, priority: int, limit: int
) -> Any:
    return at._claim_oldest(queue, priority, limit)


@bug("db.claims.ClaimTexts.oldest", "conformance/query_plans", on="postgresql")
def claims_read_rows_that_are_not_due(oldest: Any, texts: Any, shown: str) -> str:
    return str(oldest(texts, shown)).replace(f"(SELECT {texts.now})", texts.now)


@bug("run.calls.Calls.not_now", "conformance/durable_eta")
def a_request_to_stop_ends_with_its_run(look: Any, at: Any, processor: Any, task: Any) -> Any:
    return look(at, processor, replace(task, cancel_request=None))


@bug("run.calls.TaskRun.settlement", "unit/processors")
def a_task_whose_code_has_not_run_is_done(judge: Any, *args: Any) -> Any:
    *run, value, error = args
    return judge(*run, None if isinstance(value, Iterator) else value, error)


@bug("run.celery_context.limited", "unit/time_limits end_with")
def time_limits_are_not_kept(_: Any, processor: Any, call: Any) -> Any:
    return call()


# -- settle ---------------------------------------------------------------------------------------


@bug("db.claims.Claims.settle", "conformance/settlements without_its_lease")
def a_late_end_of_a_run_is_accepted(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    versions = {row.id: row.version for row in at.unclaimed(one.task.id for one in settlements)}
    ends = [
        one._replace(task=replace(one.task, version=versions.get(one.task.id, 0)))
        for one in settlements
    ]
    return settle(at, ends, on)


@bug("db.claims.Claims.settle", "duplicated", "too often")
def ends_of_runs_are_not_written(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    return {one.task.id for one in settlements}


@ends("conformance/outcomes")
def a_retry_is_a_failure(one: Any) -> Any:
    return one._replace(move="fail") if one.move == "schedule_retry" else one


@ends("conformance/outcomes")
def a_retry_is_at_once(one: Any) -> Any:
    is_retry = one.move == "schedule_retry"
    return one._replace(expected_time=one.task.expected_time) if is_retry else one


@ends("conformance/deferrals")
def a_task_without_a_processor_fails(one: Any) -> Any:
    return one._replace(move="fail") if one.due_time else one


@ends("conformance/deferrals")
def a_deferred_task_is_due_at_its_next_try(one: Any) -> Any:
    return one._replace(due_time=None)


@ends("unit/runner")
def a_deferral_counts_from_the_creation(one: Any) -> Any:
    age = one.task.due - one.task.create_time
    return one._replace(expected_time=one.expected_time + age / 10) if one.due_time else one


@bug("model.text.storable", "duplicated")
def errors_are_stored_as_they_are(storable: Any, raw: str, *_: Any) -> str:
    return raw


@bug("db.claims.Claims.settle", "unit/runner")
def rows_are_not_given_back(settle: Any, at: Any, settlements: Any, on: Any = None) -> Any:
    ended = [one for one in settlements if one.move != "give_back"]
    return settle(at, ended, on) | {one.task.id for one in settlements}


@bug("events.Events.emit", "unit/runner")
def a_settlement_waits_in_silence(tell: Any, at: Any, name: str, /, **fields: Any) -> None:
    if name != "settle.waits":
        tell(at, name, **fields)


@bug("db.database.Database.repeat", "unit/core outcome")
def conflicts_are_not_tried_again(
    repeat: Any, at: Any, work: Any, connect: Any, id: Any = None, *_: Any, **__: Any
) -> Any:
    return repeat(at, work, connect, id, 1)


@bug("db.engines.Failure.caused", "unit/core cannot_work")
def a_full_database_is_no_outage(caused: Any, failure: Failure, error: Any) -> bool:
    return failure is not engines.UNABLE and bool(caused(failure, error))


@bug("db.database.translate", "unit/core outcome")
def an_unknown_outcome_is_an_outage(translate: Any, error: Any, id: Any, *more: Any) -> Any:
    return translate(error, None, *more)


@bug("db.database.BoundedStep.cut", "conformance/outages falls_silent", on="postgresql")
def a_silent_server_holds_calls_for_ever(*_: Any) -> None: ...


@bug("db.database.make_engine", "reliability/faults slow_database", on="postgresql")
def all_callers_share_one_connection(make: Any, url: Any, pool_size: int, *more: Any) -> Any:
    made = make(url, 1, *more)
    made.pool._max_overflow = 0
    return made


@bug("db.migrations._alone_on_postgresql", "migration/migrations long_transaction", on="postgresql")
@contextmanager
def a_migration_waits_as_long_for_a_lock_as_for_its_turn(
    alone: Any, on: Any, *args: Any
) -> Iterator[None]:
    with alone(on, *args):
        on.exec_driver_sql(f"SET LOCAL lock_timeout = '{migrations._TURN_S}s'")
        yield


# -- leases and sweeps ----------------------------------------------------------------------------


@bug("run.calls.WorkerMemory.record_renewal", "failed")
def leases_are_renewed_with_an_error(tell: Any, *_: Any) -> None:
    raise AttributeError


@bug("db.sweep_queries.Leases.recover", "too often")
def lost_leases_are_not_counted(recover: Any, at: Any, most: int, *args: Any) -> Any:
    return recover(at, 1000, *args)


@bug("db.sweep_queries.Leases.recover_dead", "two leases")
def the_rows_of_living_workers_are_released(
    release: Any, at: Any, workers: Sequence[str], *args: Any, **options: Any
) -> Any:
    all = [f"w{number}/{pid}" for number in range(9) for pid in range(10_000_000, 10_000_050)]
    return release(at, [*workers, *all], *args, **options)


@bug("db.sweep_queries.Leases.renew", "conformance/leases", on="postgresql")
def a_locked_row_is_not_renewed(renew: Any, *args: Any) -> Any:
    return renew(*args)._replace(skipped=())


@bug("db.sweep_queries.Leases.renew", "conformance/leases")
def rows_that_were_lost_on_the_way_are_renewed(renew: Any, at: Any, workers: Any, *_: Any) -> Any:
    return renew(at, workers, clock.EPOCH)


@bug("run.calls.TaskRun.lease_left_s", "conformance/leases")
def a_lease_never_ends(left_s: Any, at: Any) -> float:
    return inf


@bug("worker.sweep.SweepLoop._sweep_stale", "unit/sweeper missed_only")
def beat_is_missed_after_each_outage(sweep: Any, at: Any) -> None:
    at._contact.__dict__["_since"] = -inf
    at._contact.__dict__["_answered_at"] = clock.monotonic()
    sweep(at)


@bug("worker.quick_loops.running_pids", "conformance/leases replaces")
def a_process_that_is_being_replaced_stops_renewals(_: Any, pool: Any) -> set[int]:
    return set(pool.info["processes"])


@bug("model.clock.monotonic", "unit/core suspension")
def a_suspended_host_keeps_its_leases(_: Any) -> float:
    return monotonic()


@bug("db.database.Database.repeat", "conformance/claims left_locked", on="postgresql")
def a_locked_row_is_waited_for_until_leases_end(repeat: Any, *args: Any, **options: Any) -> Any:
    return repeat(*args, **{**options, "waits_for_locks": True})


@bug("db.sweep_queries.is_rare", "conformance/query_plans")
def all_rows_are_read_for_lost_leases(_: Any, condition: Any) -> Any:
    return condition


@bug("db.sweep_queries.SweepQueries.begin_sweep", "conformance/sweep")
def two_beats_sweep_twice(begin: Any, at: Any, partition: int, partitions: int, _: float) -> Any:
    return begin(at, partition, partitions, -1)


@bug("db.sweep_queries.SweepQueries.begin_sweep", "conformance/sweep")
def rows_armed_before_the_clock_was_set_back_are_forgotten(begin: Any, at: Any, *args: Any) -> Any:
    since = begin(at, *args)
    if since is not None:
        at.__dict__["latest"] = since = max(since, at.__dict__.get("latest", since))
    return since


@bug("db.sweep_queries.SweepQueries.next_queues", "conformance/sweep")
def a_sweep_looks_at_all_queues(walk: Any, at: Any, after: Any, most: int) -> Any:
    return walk(at, after, 1_000_000)


@bug("db.sweep_queries.WorkerTable.expire", "conformance/leases")
def workers_of_the_future_live_on(expire: Any, at: Any, silent_s: float) -> Any:
    now = at._db.now()
    late = update(at._w).where(at._w.c.seen_at > now).values(seen_at=now)
    at._db.autocommitted(lambda c: c.execute(late))
    return expire(at, silent_s)


def _read_the_clock_of_the_worker(patch: pytest.MonkeyPatch) -> None:
    strftime = Times._strftime

    def read(times: Times, *words: str) -> str:
        true_us, times.now_us = times.now_us, times.now_us + times.skew_us()
        try:
            return strftime(times, *words)
        finally:
            times.now_us = true_us

    patch.setattr(Times, "_strftime", read)


BUGS["the_workers_clock_decides"] = Bug(_read_the_clock_of_the_worker, ("early",))


# -- the worker and its broker --------------------------------------------------------------------


@bug("worker.dispatcher.Dispatcher.left_to_table", "unit/dispatcher")
def other_workers_help_after_the_next_sweep(take: Any, at: Any) -> Any:
    list(take(at))
    return []


@bug("worker.dispatcher.Dispatcher.close", "unit/dispatcher early_entries")
def a_dispatcher_closes_while_entries_are_held(close: Any, at: Any) -> Any:
    lock, at._lock = at._lock, nullcontext()
    try:
        return close(at)
    finally:
        at._lock = lock


@bug("worker.dispatcher.Dispatcher._drain_chunk", "reliability/dispatching")
def fresh_tasks_starve_a_backlog(turn: Any, at: Any, *args: Any) -> Any:
    return None if at.waiting else turn(at, *args)


@bug("worker.dispatcher.Dispatcher._continue_after", "unit/dispatcher")
def entries_of_drained_rows_are_kept(verb: Any, queue: Any, request: Any, report: Any) -> Any:
    return verb(queue, request, report._replace(drained={}))


@bug("worker.dispatcher.Dispatcher._continue_after", "unit/dispatcher drain_has_claimed")
def entries_of_rows_given_back_are_dropped(verb: Any, queue: Any, request: Any, to: Any) -> Any:
    drained = dict.fromkeys(to.drained, 1 << 63)
    return verb(queue, request, to._replace(drained=drained))


@bug("worker.dispatcher.Dispatcher._entry_chunk", "reliability/dispatching")
def one_process_gets_all_entries(_: Any, at: Any, number: int, size: int) -> Any:
    return ChunkRequest(tuple(at._ready.pop(size)), number=number) if at._ready else None


@bug("worker.dispatcher.QueueDrain.wants_chunk", "reliability/dispatching")
def quick_tasks_wait_behind_a_slow_one(_: Any, at: Any) -> bool:
    return at.is_deep or not at.chunks


@bug("worker.patches.reset_hub", "unit/runtime lost_connection")
def a_lost_connection_ends_the_worker(_: Any, hub: Any) -> Any:
    return hub.reset()


@bug("broker.arming.Sender.arm", "unit/background")
def a_time_limit_is_a_failure_of_the_broker(send: Any, *args: Any) -> bool:
    try:
        return bool(send(*args))
    except Exception:
        return False


@bug("broker.arming.Publisher.send", "unit/broker")
def a_refused_queue_is_tried_each_time(send: Any, at: Any, *args: Any) -> bool:
    at._refused.clear()
    return bool(send(at, *args))


@bug("broker.link.bounded_connection", "unit/rules confirmation")
def a_confirmation_may_take_any_time(connect: Any, *args: Any, **options: Any) -> Any:
    made = connect(*args, **options)
    made.transport_options.pop("read_timeout", None)
    return made


@bug("broker.link.check_headers", "integration/publisher headers")
def headers_of_any_size_are_sent(_: Any, *args: Any) -> None: ...


@bug("broker.redis_timer.redis_location", "unit/core the_redis_is")
def only_the_first_redis_is_asked(find: Any, *args: Any) -> Any:
    found = find(*args)
    return found._replace(urls=found.urls[:1])


# -- operators ------------------------------------------------------------------------------------


@bug("db.task_rows.CancelRequests.make", "conformance/cancel")
def a_request_to_stop_may_come_too_late(make: Any, at: Any, on: Any, task: Any) -> bool:
    if not make(at, on, task):
        raise TaskStateError("too late", task.id, task.status)
    return True


@bug("db.policy_rows.PolicyTable.set", "conformance/policies")
def a_later_pause_is_shorter(change: Any, at: Any, kind: str, name: str, to: Any, by: str) -> Any:
    if to.get("paused_until"):
        change(at, kind, name, {"is_paused": False, "paused_until": None}, by)
    return change(at, kind, name, to, by)


@bug("limits.tracked_waitlists.TrackedWaitlist.needs_process", "reliability/dispatching")
def a_higher_limit_waits_for_long_rows(needs: Any, at: Any, now: float) -> bool:
    return bool(at.wanted) if at.serving else needs(at, now)


@bug("limits.tracked_waitlists.TrackedWaitlist.probed", "unit/dispatcher pace_of_a_raised_rate")
def probes_do_not_come_at_the_pace_of_a_rate(probed: Any, at: Any, state: Any) -> None:
    probed(at, state._replace(recheck_s=WAITLIST_RECHECK_S))


# -- the Redis timer ------------------------------------------------------------------------------


@bug("broker.redis_timer.RedisPoller._pass_on", "left in Redis")
def passed_on_entries_are_not_deleted(pass_on: Any, poller: Any, taken: Any) -> None:
    pass_on(poller, taken)
    poller._passed_on = []


# -- recurring schedules and durable Celery tasks -------------------------------------------------


@bug("recurring.creation.plan", "left out")
def the_first_task_of_a_visit_is_forgotten(plan: Any, *args: Any) -> Any:
    planned = plan(*args)
    return planned._replace(times=planned.times[1:] or planned.times)


@bug("recurring.recurring.Change.with_first_tasks", "conformance/recurring another")
def the_first_occurrences_wait_for_a_sweep(_: Any, at: Any, schedule: Any) -> Any:
    return schedule


@bug("recurring.creation.RecurringTable.take_keys", "conformance/recurring its_key")
def tasks_of_schedules_own_no_keys(_: Any, _table: Any, _on: Any, tasks: Any) -> Any:
    return {task.id for task in tasks}


@bug("run.chunk.ChunkRunner.wait_for_detached", "unit/side_by_side of_a_waitlist")
def a_recovered_row_of_a_waitlist_runs_beside_others(_: Any, _runner: Any) -> None: ...


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
