"""Explain why a task has not run, or how it ended.

Each rule is a function that yields the reasons of one kind. `waits_for` has those of a task that
waits, first what an operator can end. The verdict explains a group of late tasks by one of them, so
these sentences are about its tag and its queue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import func, select

from delaytasks.broker.link import broker_error
from delaytasks.db.sweep_queries import RegisteredWorker, SweepState
from delaytasks.db.task_rows import has_status
from delaytasks.model.inputs import processor_tag, show_duration
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import ASKED, DelayedTask
from delaytasks.model.text import DEFERRALS, MOST_NAMES, count, one_more_worker, some_values
from delaytasks.operate.texts import last_line, show_instant

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class Reason(NamedTuple):
    """One reason, for people and for programs."""

    #: A name that programs compare, such as "paused".
    code: str
    #: The reason in one or two sentences.
    sentence: str
    #: The remedy for an operator; empty if none is needed.
    remedy: str = ""
    #: The name of the policy, the schedule or the actor in the sentence.
    name: str = ""

    @property
    def text(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence} {self.remedy}".rstrip()


# -- what explains tasks --------------------------------------------------------------------------


#: Tags in the answer to what occupies the processes.
MOST_RUNNING_TAGS = 3
#: Tasks that run for longer are named if they occupy all processes.
LONG_RUN_S = 5.0


class Facts:
    """What a deployment has, read when it is asked for the first time.

    Instants are those of the database, whose clock decides what is due.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.store, self.settings = runtime, runtime.store, runtime.settings
        self.now = self.store.tasks.now()

    @cached_property
    def workers(self) -> Sequence[RegisteredWorker]:
        return self.store.workers.registered(self.now, self.settings.silent_s)

    @property
    def alive(self) -> list[RegisteredWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    def serving(self, queue: str) -> list[RegisteredWorker]:
        """Return the live workers that serve a queue."""
        return [worker for worker in self.alive if worker.serves(queue)]

    @property
    def beat_age_s(self) -> float | None:
        """For how many seconds no message of beat has reached a live worker.

        None if no live worker could receive one: none reads these messages, or none has a broker.
        """
        services = [worker.services for worker in self.alive]
        ages = [each.beat_s for each in services if each.broker_down_s is None]
        return min((age_s for age_s in ages if age_s is not None), default=None)

    @cached_property
    def policies(self) -> Sequence[Policy]:
        return self.store.policies.read()

    def policies_of(self, task: DelayedTask) -> list[Policy]:
        """Return the policies of the task's tag and queue."""
        names = ("tag", task.tag), ("queue", task.queue)
        return [policy for policy in self.policies if (policy.kind, policy.name) in names]

    @cached_property
    def sweeps(self) -> Sequence[SweepState]:
        """The last sweep of each partition."""
        number, late_s = self.settings.sweep_partitions, self.settings.self_sweep_s
        return self.store.sweeps.last(number, late_s, self.now)

    @cached_property
    def long_running(self) -> list[tuple[str, int, float]]:
        """The tags with the most running tasks, if these run for long, the number of these tasks,
        and for how many seconds the first of them has run. A few rows for each process are read."""
        t = self.store.schema.tasks
        query = select(t.c.tag, func.count(), func.min(t.c.execution_time))
        query = query.where(has_status(t, Status.RUNNING), t.c.execution_time.is_not(None))
        query = query.group_by(t.c.tag).order_by(func.count().desc()).limit(MOST_RUNNING_TAGS)
        rows = self.store.database.rows(query)
        found = [(tag, number, (self.now - since).total_seconds()) for tag, number, since in rows]
        return [each for each in found if each[-1] > LONG_RUN_S]

    def first(self, query: Any) -> Any:
        """Return the first row of a query; None if there is none."""
        return next(iter(self.store.database.rows(query.limit(1))), None)

    def count(self, rows: Any) -> int:
        return int(self.first(select(func.count()).select_from(rows.subquery()))[0])


#: A rule for the reasons of a task.
Rule = Callable[[Facts, DelayedTask], Iterator[Reason]]


def why(runtime: Runtime, task: DelayedTask) -> list[Reason]:
    """Return the reasons why a task has not run, or how it ended, the most important one first.

    For a task that runs or has ended, the first reason is its status. There is at least one.
    """
    facts, ended = Facts(runtime), _OF_STATUS.get(task.status)
    if ended is not None:
        return [*ended(facts, task), *_recurring(facts, task)]
    rules: tuple[Rule, ...] = (_transport, _expired, _recurring)
    return waits_for(facts, task) + [reason for rule in rules for reason in rule(facts, task)]


def waits_for(facts: Facts, task: DelayedTask) -> list[Reason]:
    """Return what a task waits for, or else that it is due."""
    rules: tuple[Rule, ...] = (_paused, _limited, _future, _unserved, _deferred)
    found = [reason for rule in rules for reason in rule(facts, task)]
    return found or [_due(facts, task)]


# -- a task that waits ----------------------------------------------------------------------------


#: A waitlist is counted up to this number.
MOST_WAITLIST_COUNTED = 10_000
#: For each deferral, the remedy.
_REMEDIES = {
    "no_processor": "Import the module of the processor in a worker of the queue.",
    "no_key": "Give the workers the key (delaytasks_encryption_keys).",
    "no_time_limits": "Start a worker of the queue with -P prefork.",
    "newer_body": "Deploy the new code to the workers.",
}


def _paused(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    for policy in facts.policies_of(task):
        if policy.is_paused:
            remedy = f"To resume it: delaytasks resume --{policy.kind} {quote(policy.name)}"
            sentence = pause_of(policy, facts.now, show_instant)
            yield Reason("paused", sentence, remedy, policy.name)


def pause_of(policy: Policy, now: datetime, show: Callable[[datetime], str]) -> str:
    """Return who has paused a tag or a queue, since when, until when, and what is held.

    `show` returns the text of an instant.
    """
    sentence = f"The {policy.kind} {policy.name} is paused"
    if policy.updated_by:
        sentence += f" by {policy.updated_by}"
    if policy.update_time is not None:
        ago = show_duration((now - policy.update_time).total_seconds())
        sentence += f" since {show(policy.update_time)} ({ago})"
    if policy.paused_until is not None:
        sentence += f", until {show(policy.paused_until)}"
    return f"{sentence}, {policy.held:,} held." if policy.held else f"{sentence}."


def _limited(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    policies, is_held = facts.policies_of(task), task.status is Status.HELD
    if any(policy.is_paused for policy in policies):
        return
    policy = next((policy for policy in policies if policy.has_limits), None)
    if policy is not None:
        t, w = facts.store.schema.tasks, facts.store.schema.waitlists.c
        of_tag = has_status(t, Status.RUNNING), t.c.tag == task.tag
        running = facts.count(select(t.c.id).where(*of_tag))
        is_full = policy.concurrency is not None and running >= policy.concurrency
        if is_held or (is_full and task.expected_time <= facts.now):
            waitlist = select(w.task_id).where(w.queue == task.queue, w.tag == task.tag)
            waiting = facts.count(waitlist.limit(MOST_WAITLIST_COUNTED))
            sentence = f"The limit of the tag {task.tag} is used up ({limits_of(policy)})."
            numbers = f"Running: {running:,}; in the waitlist: {waiting:,}."
            remedy = f"To change the limit: delaytasks limit --tag {quote(task.tag)}"
            yield Reason("limit", f"{sentence} {numbers}", remedy, task.tag)
    elif is_held:
        text = "It is HELD, and nothing holds it. A sweep releases it within about a minute."
        yield Reason("held", text)


def limits_of(policy: Policy) -> str:
    """Return the limits of a tag in words."""
    limits = {
        "concurrency": policy.concurrency,
        "of each key": policy.concurrency_per_key,
        "rate": policy.rate_text,
    }
    return ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)


def _future(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    if task.due <= facts.now:
        return
    error, at = last_line(task.error), _next_try(facts, task)
    if task.runs and error:
        text = f"Attempt {task.runs} failed: {error}. Retry {task.runs} is due at {at}."
        yield Reason("retry", text, f"To run it now: delaytasks reschedule {task.id} --delay 0")
    else:
        yield Reason("future", f"It is due at {at}, by the clock of the database.")


def _next_try(facts: Facts, task: DelayedTask) -> str:
    wait_s = (task.expected_time - facts.now).total_seconds()
    return f"{show_instant(task.expected_time)}, in {show_duration(wait_s)}"


def _unserved(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    """Yield why no live worker can run tasks of the queue and the tag, unless one probably can."""
    serving, known_as = facts.serving(task.queue), {task.tag, processor_tag(task.tag)}
    if not serving:
        yield _no_worker(facts, task.queue)
        return
    has_none = all(each.tags is not None and not known_as & each.tags for each in serving)
    if has_none and _deferral(task) != "no_processor":  # the row tells it, and the next try
        names = some_values([each.name for each in serving], MOST_NAMES)
        sentence = f"No worker of the queue {task.queue} has a processor for the tag {task.tag}"
        imports = "Import the module of the processor in the worker (Celery's imports or include)"
        yield Reason("no_processor", f"{sentence} ({names}).", f"{imports}, or correct the tag.")


def _no_worker(facts: Facts, queue: str) -> Reason:
    sentence = f"No live worker serves the queue {queue}"
    remedy = "Start a worker: celery -A … worker"
    if facts.alive:
        queues = sorted({name for worker in facts.alive for name in worker.queues})
        served = some_values(queues, MOST_NAMES) or "no queue of delaytasks"
        names = some_values([worker.name for worker in facts.alive], MOST_NAMES)
        sentence += f"; live workers serve {served} ({names})"
        remedy = one_more_worker([queue], facts.settings.namespace)
    if silent := [worker for worker in facts.workers if worker.serves(queue)]:
        last = min(silent, key=lambda worker: worker.age_s)
        sentence += f"; {last.name}, which did, was seen {show_duration(last.age_s)} ago"
    return Reason("no_worker", f"{sentence}.", remedy)


def _deferral(task: DelayedTask) -> str:
    """Return the code of the reason for a deferral, from the error that the worker wrote."""
    error = task.error or ""
    found = (code for code, begin in DEFERRALS.items() if error.startswith(begin))
    return next(found, "deferred")


def _deferred(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    if task.due <= facts.now < task.expected_time:
        cause, error = _deferral(task), last_line(task.error).partition("; next try at ")[0]
        tried = f"No worker could run the tag {task.tag} when it was tried: {error}."
        text = f"{tried} The next try is at {_next_try(facts, task)}."
        yield Reason(cause, text, _REMEDIES.get(cause, ""))


def _due(facts: Facts, task: DelayedTask) -> Reason:
    """Return what keeps workers from a task that is due, if anything does."""
    if (facts.now - task.due).total_seconds() > facts.settings.grace_s:
        if busy := _all_busy(facts, task.queue):
            return busy
        ages = [sweep.age_s for sweep in facts.sweeps if sweep.age_s is not None]
        if not ages or max(ages) > facts.settings.self_sweep_s:
            last = f"the last was {show_duration(max(ages))} ago" if ages else "there was none yet"
            text = f"No sweep looks for overdue tasks: {last}."
            return Reason("no_sweep", text, "Check that beat and a worker run.")
    lost = ""
    if task.lapses:
        times = count(task.lapses, "time")
        lost = f"; {times} in a row the worker died or lost its lease while the task ran"
    return Reason("due", f"A worker of the queue {task.queue} should be free soon{lost}.")


def _all_busy(facts: Facts, queue: str) -> Reason | None:
    """Return what occupies all processes of the workers of a queue, if none is free."""
    serving = facts.serving(queue)
    if any(each.busy is None or each.busy < each.concurrency for each in serving):
        return None
    processes = sum(each.concurrency for each in serving)
    sentence = f"No process of the workers of the queue {queue} is free (of {processes:,})"
    if not (running := facts.long_running):
        text = f"{sentence}: more tasks are due than they can run."
        return Reason("busy", text, "Start more workers, or give them more processes.")
    named = ", ".join(
        f"{tag} ({number:,}, the first since {show_duration(for_s)})"
        for tag, number, for_s in running
    )
    text = f"{sentence}: they have been busy for long with {named}."
    remedy = "If they hang, give their processors a time_limit, and restart the workers."
    return Reason("busy", text, remedy, running[0][0])


def _transport(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    """Ask the broker and the timer, if the task waits for them now."""
    settings, timer = facts.settings, facts.runtime.redis_timer
    limit_s = settings.publish_limit_s
    wait_s, horizon_s = (task.expected_time - facts.now).total_seconds(), settings.horizon_s
    is_due_soon = horizon_s is None or wait_s <= horizon_s
    if task.status is Status.HELD or not (settings.uses_broker and is_due_soon):
        return
    error = broker_error(facts.runtime.celery, limit_s)
    if error is not None:
        yield Reason("broker_down", broker_down(error), "Bring the broker back.")
    if timer is not None and not timer.is_reachable():
        sentence = f"The Redis of the timer does not answer: no answer within {limit_s:g} s."
        effect = "Until it does, the sweep finds the task when it is overdue."
        remedy = "Bring this Redis back (delaytasks_timer)."
        yield Reason("timer_down", f"{sentence} {effect}", remedy)


def broker_down(error: str) -> str:
    """Return that the broker does not answer, and what this means."""
    what = "workers read the table, so tasks start a few seconds late"
    return f"The broker does not answer; {what}: {error}"


def _expired(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    late_s, max_late_s = (facts.now - task.due).total_seconds(), task.max_late_s
    if max_late_s is not None and late_s > max_late_s:
        sentence = f"It has expired: it may be {show_duration(max_late_s)} late."
        effect = "The worker that takes it cancels it instead of running it."
        remedy = f"To run it nevertheless: delaytasks reschedule {task.id} --delay 0"
        yield Reason("expired", f"{sentence} {effect}", remedy)


# -- a task that runs or has ended ----------------------------------------------------------------


def _running(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    until = task.lease_until
    if until is not None and until < facts.now:
        text = f"The worker process {task.worker} died or lost its lease at {show_instant(until)}."
        yield Reason("lease_over", f"{text} The next sweep gives the task to another worker.")
        return
    end = "(unknown)" if until is None else show_instant(until)
    sentence = f"It runs{_begun(task)}; its lease lasts until {end}."
    if task.cancel_request:
        yield Reason("running", f"{sentence} A caller has asked it to stop.")
    else:
        remedy = f"To ask it to stop: delaytasks cancel {task.id} --running"
        yield Reason("running", sentence, remedy)


def _done(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    yield Reason("done", f"It is done: it ran{_begun(task)}.")


def _failed(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    times = f" after {count(task.runs, 'attempt')}" if task.runs > 1 else ""
    text = f"It failed{times}{_at(task.update_time)}: {last_line(task.error)}."
    yield Reason("failed", text, f"To run it again: delaytasks rerun {task.id}")


def _cancelled(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    a, entry, error = facts.store.schema.audit.c, None, last_line(task.error)
    if (task.cancel_request or ASKED) != ASKED:  # a cancel of many tasks leaves its log entry
        entry = facts.first(select(a.id, a.actor).where(a.id == task.cancel_request))
    by = "" if entry is None else f" by {entry.actor} (entry {entry.id} of the log)"
    text = f"It was cancelled{_at(task.update_time)}{by}{f': {error}' if error else ''}."
    remedy = f"To run it nevertheless: delaytasks rerun {task.id}"
    yield Reason("cancelled", text, remedy, "" if entry is None else entry.actor)


_OF_STATUS: dict[Status, Rule] = {
    Status.RUNNING: _running,
    Status.DONE: _done,
    Status.FAILED: _failed,
    Status.CANCELLED: _cancelled,
}


def _at(instant: datetime | None) -> str:
    return "" if instant is None else f" at {show_instant(instant)}"


#: Why one or many runs began late, by the name of the `LateReason`.
LATE_BECAUSE = {
    "unnoticed": "no message reached a worker in time",
    "busy": "all processes of the worker were busy",
    "no_worker": "the worker started only later",
    "database": "the database did not answer",
    "broker": "the broker or the timer did not answer",
    "held": "a pause or a limit was in the way",
    "deferred": "no worker could run the task before",
    "scheduled_late": "the call came after the due time",
    "lease_lost": "an earlier run lost its lease",
    "unknown": "a worker of a newer version noted a reason that this version does not know",
}
_BROUGHT = {
    "drain": " (a drain of the queue found it)",
    "waitlist": " (it was in the waitlist of the tag)",
}


def _begun(task: DelayedTask) -> str:
    """Return where the task has begun and, if it was late, when and why."""
    began = task.execution_time
    where = f" on {task.worker}" if task.worker else ""
    if began is None or began <= task.due:
        return "" if began is None else where
    late = show_duration((began - task.due).total_seconds())
    text = f"{where} since {show_instant(began)}, {late} after it was due"
    # The end of a run notes the reason; nothing is known of a task that runs.
    if task.status is Status.RUNNING or task.late_start is None:
        return text
    brought_by, reason = task.late_start
    return f"{text}, because {LATE_BECAUSE[reason]}{_BROUGHT.get(brought_by, '')}"


# -- for each task --------------------------------------------------------------------------------


#: The key of a task that a recurring schedule has made: its name and the time of the occurrence.
_RECURRING_KEY = re.compile(r"(.+)@[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z")


def _recurring(facts: Facts, task: DelayedTask) -> Iterator[Reason]:
    """Name the recurring schedule that has made the task."""
    if match := _RECURRING_KEY.fullmatch(task.key or ""):
        r = facts.store.schema.recurring.c
        mine = r.name == match[1], r.tag == task.tag
        if found := facts.first(select(r.name, r.timing, r.is_paused).where(*mine)):
            name, timing, is_paused = found
            paused = ", which is paused" if is_paused else ""
            text = f"It is a task of the recurring schedule {name} ({timing}){paused}."
            command = f"delaytasks recurring list {quote(name)}"
            yield Reason("recurring", text, f"To see its next occurrence: {command}", name)
