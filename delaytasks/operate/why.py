"""Explain why a task has not run, or how it ended.

Each rule is a function that yields the reasons of one kind. `_waiting` has the rules for a task
that waits, those first that an operator can end. The verdict takes its reasons for many late tasks
from `why_late`, which shares the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import func, select

from delaytasks.broker.link import broker_error
from delaytasks.db.policy_rows import is_entry_of
from delaytasks.db.sweep_queries import RegisteredWorker
from delaytasks.db.task_rows import has_status
from delaytasks.model.body import PREFIX, name_in, names_of
from delaytasks.model.clock import MAX_ID, first_id, from_us
from delaytasks.model.inputs import processor_tag, show_duration
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import ASKED, DelayedTask, is_encrypted
from delaytasks.model.text import DEFERRALS, MOST_NAMES, count, one_more_worker, some_values
from delaytasks.operate.texts import last_line, show_instant

if TYPE_CHECKING:
    from delaytasks.db.store import Store
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


# -- one task, and what is read about it ----------------------------------------------------------


#: A waitlist is counted up to this number.
MOST_WAITLIST_COUNTED = 10_000
#: The ids of a minute: a cancel and its log entry have the times of the clocks of two machines.
IDS_AROUND = first_id(from_us(60_000_000)) - first_id(from_us(0))
#: The key of a task that a recurring schedule has made: its name and the time of the occurrence.
_RECURRING_KEY = re.compile(r"(.+)@[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z")


class _Case:
    """A task to explain. A rule reads from an index what it needs to know.

    Instants are those of the database, whose clock decides what is due.
    """

    def __init__(self, runtime: Runtime, task: DelayedTask) -> None:
        self.runtime, self.task = runtime, task
        self.store, self.settings = runtime.store, runtime.settings
        self.now = self.store.tasks.now()
        #: Seconds until the next try; negative if it should have begun.
        self.wait_s = (task.expected_time - self.now).total_seconds()
        self.late_s = (self.now - task.due).total_seconds()

    @cached_property
    def workers(self) -> Sequence[RegisteredWorker]:
        return self.store.workers.registered(self.now, self.settings.silent_s)

    @cached_property
    def policies(self) -> Sequence[Policy]:
        """The policies of the task's tag and queue."""
        return self.store.policies.read(("tag", self.task.tag), ("queue", self.task.queue))

    @cached_property
    def swept_s(self) -> float | None:
        """Seconds since the last sweep of all partitions; None if there was none."""
        number, late_s = self.settings.sweep_partitions, self.settings.self_sweep_s
        ages = [sweep.age_s for sweep in self.store.sweeps.last(number, late_s, self.now)]
        return max((age_s for age_s in ages if age_s is not None), default=None)

    def count_running(self, key: str | None = None) -> int:
        """Count the running tasks of the tag, or those of a limit key."""
        t = self.store.schema.tasks
        where = [has_status(t, Status.RUNNING), t.c.tag == self.task.tag]
        return self._count(select(t.c.id).where(*where, *([t.c.limit_key == key] if key else [])))

    def count_waitlist(self) -> int:
        w = self.store.schema.waitlists.c
        mine = select(w.task_id).where(w.queue == self.task.queue, w.tag == self.task.tag)
        return self._count(mine.limit(MOST_WAITLIST_COUNTED))

    def is_in_waitlist(self) -> bool:
        if self.task.status is not Status.HELD:
            return False
        waitlist = self.store.schema.waitlists
        return bool(self.first(select(waitlist.c.task_id).where(is_entry_of(waitlist, self.task))))

    def first(self, query: Any) -> Any:
        """Return the first row of a query; None if there is none."""
        return next(iter(self.store.database.rows(query.limit(1))), None)

    def _count(self, rows: Any) -> int:
        return int(self.first(select(func.count()).select_from(rows.subquery()))[0])


def why(runtime: Runtime, task: DelayedTask) -> list[Reason]:
    """Return the reasons why a task has not run, or how it ended, the most important one first.

    For a task that runs or has ended, the first reason is its status. There is at least one.
    """
    case = _Case(runtime, task)
    rules = _OF_STATUS.get(task.status)
    reasons = list(_waiting(case) if rules is None else rules(case))
    return [*reasons, *_recurring(case)]


def _waiting(case: _Case) -> Iterator[Reason]:
    """Yield what the task waits for, or else that it is due, and then what is wrong around it."""
    rules = (_paused, _limited, _not_due, _unserved, _no_key)
    found = [reason for rule in rules for reason in rule(case)]
    yield from found or _due(case)
    yield from _transport(case)
    yield from _expired(case)


# -- why no worker takes the tasks of a queue and a tag -------------------------------------------


def unserved(
    queue: str, tag: str, workers: Sequence[RegisteredWorker], namespace: str
) -> Reason | None:
    """Return why no live worker can run tasks of this queue and tag; None if one probably can.

    `namespace` is the prefix of the queues in the broker.
    """
    serving = [each for each in workers if each.is_alive and each.serves(queue)]
    if not serving:
        return _no_worker(queue, workers, namespace)
    known_as = {tag, processor_tag(tag)}
    if any(each.tags is None or known_as & each.tags for each in serving):
        return None
    names = some_values([each.name for each in serving], MOST_NAMES)
    return Reason(
        "no_processor",
        f"No worker of the queue {queue} has a processor for the tag {tag} ({names}).",
        "Import the module of the processor in the worker (Celery's imports or include), or "
        "correct the tag.",
    )


def _no_worker(queue: str, workers: Sequence[RegisteredWorker], namespace: str) -> Reason:
    sentence = f"No live worker serves the queue {queue}"
    alive = [worker for worker in workers if worker.is_alive]
    silent = [worker for worker in workers if worker.serves(queue)]
    live_queues = sorted({name for worker in alive for name in worker.queues})
    remedy = "Start a worker: celery -A … worker"
    if live_queues:
        remedy = one_more_worker([queue], namespace)
    elif alive:  # -Q of the live workers names none of our queues
        name = quote(f"{namespace}.{queue}")
        more = f"or start one more: celery -A … worker -Q {name}"
        remedy = f"Add {name} to the -Q of a worker, {more}"
    if silent:
        last = min(silent, key=lambda worker: worker.age_s)
        sentence += f"; {last.name}, which did, was seen {show_duration(last.age_s)} ago"
    elif alive:
        served = some_values(live_queues, MOST_NAMES) or "no queue of delaytasks"
        names = some_values([each.name for each in alive], MOST_NAMES)
        sentence += f"; live workers serve {served} ({names})"
    elif not workers:
        sentence += "; no worker runs"
    return Reason("no_worker", f"{sentence}.", remedy)


class LongRunning(NamedTuple):
    """The running tasks of a tag, and for how long the first of them has run."""

    tag: str
    tasks: int
    for_s: float


#: Tags in the answer to what occupies the processes.
MOST_RUNNING_TAGS = 3
#: Tasks that run for longer are named if they occupy all processes.
LONG_RUN_S = 5.0


def long_running(store: Store, now: datetime) -> list[LongRunning]:
    """Return those of the tags with the most running tasks whose tasks run for long.

    A few rows for each process are read.
    """
    t = store.schema.tasks
    query = select(t.c.tag, func.count(), func.min(t.c.execution_time))
    query = query.where(has_status(t, Status.RUNNING), t.c.execution_time.is_not(None))
    query = query.group_by(t.c.tag).order_by(func.count().desc()).limit(MOST_RUNNING_TAGS)
    rows = store.database.rows(query)
    found = [LongRunning(tag, n, (now - since).total_seconds()) for tag, n, since in rows]
    return [one for one in found if one.for_s > LONG_RUN_S]


def all_busy(
    queue: str, workers: Iterable[RegisteredWorker], running: Sequence[LongRunning]
) -> Reason | None:
    """Return which tasks occupy all processes of the workers of a queue for long, if any do."""
    serving = [each for each in workers if each.is_alive and each.serves(queue)]
    processes = sum(each.concurrency for each in serving)
    if not running or any(each.busy is None or each.busy < each.concurrency for each in serving):
        return None
    named = ", ".join(
        f"{one.tag} ({one.tasks:,}, the first since {show_duration(one.for_s)})" for one in running
    )
    return Reason(
        "busy",
        f"All {count(processes, 'process', 'processes')} of the workers of the queue {queue} are "
        f"busy, for long with {named}.",
        "If they hang, give their processors a time_limit, and restart the workers.",
        running[0].tag,
    )


# -- a task that waits ----------------------------------------------------------------------------


def _paused(case: _Case) -> Iterator[Reason]:
    for policy in case.policies:
        if not policy.is_paused:
            continue
        by = f" by {policy.updated_by}" if policy.updated_by else ""
        since, until = policy.update_time, policy.paused_until
        sentence = f"The {policy.kind} {policy.name} is paused{by}"
        if since is not None:
            ago = show_duration((case.now - since).total_seconds())
            sentence += f" since {show_instant(since)} ({ago})"
        sentence += "" if until is None else f", until {show_instant(until)}"
        remedy = f"To resume it: delaytasks resume --{policy.kind} {quote(policy.name)}"
        yield Reason("paused", f"{sentence}.", remedy, policy.name)


def _limited(case: _Case) -> Iterator[Reason]:
    task = case.task
    policy = next((each for each in case.policies if each.kind == "tag" and each.has_limits), None)
    is_waiting = case.is_in_waitlist()
    running = case.count_running() if policy is not None else 0
    is_due = task.status is Status.NOT_COMPLETE and case.wait_s <= 0
    if policy is not None and policy.concurrency is not None:
        is_waiting |= is_due and running >= policy.concurrency
    sentence = f"It waits for the limit of the tag {task.tag}"
    if is_waiting and policy is None:
        yield Reason("limit", f"{sentence}: the limit was removed a moment ago.")
    elif is_waiting and policy is not None:
        sentence += f": {_limits(case, policy, running)}"
        if waiting := case.count_waitlist():
            sentence += f". Its waitlist has {count(waiting, 'task')}"
        remedy = f"To change the limit: delaytasks limit --tag {quote(task.tag)}"
        yield Reason("limit", f"{sentence}.", remedy, task.tag)
    elif task.status is Status.HELD and not any(each.is_paused for each in case.policies):
        text = "It is HELD, and nothing holds it. A sweep releases it within about a minute."
        yield Reason("held", text)


def _limits(case: _Case, policy: Policy, running: int) -> str:
    texts, key = [], case.task.limit_key
    if policy.concurrency is not None:
        texts.append(f"{policy.concurrency} may run at the same time, and {running} do")
    if policy.concurrency_per_key is not None and key is not None:
        of_key = case.count_running(key)
        texts.append(f"{policy.concurrency_per_key} of the key {key} may run, and {of_key} do")
    if policy.rate_text is not None:
        texts.append(f"its rate is {policy.rate_text}")
    return "; ".join(texts) or "its capacity is used"


#: For each deferral, why workers could not run the tasks of a tag, and the remedy.
_DEFERRED = {
    "no_processor": (
        "no worker that tried has a processor for the tag {tag}",
        "Import the module of the processor in a worker of the queue.",
    ),
    "no_key": (
        "no worker that tried has the key of the body",
        "Give the workers the key (delaytasks_encryption_keys).",
    ),
    "no_time_limits": (
        "the tag {tag} has time limits, which need a worker with -P prefork",
        "Start a worker of the queue with -P prefork.",
    ),
    "newer_body": (
        "the body is of a newer version of the tag {tag} than the processors of the workers",
        "Deploy the new code to the workers.",
    ),
    "deferred": ("a worker could not run it", ""),
}


def deferral_of(error: str | None) -> str | None:
    """Return the code of the reason for a deferral, from the error that the worker wrote."""
    found = (code for code, begin in DEFERRALS.items() if error and error.startswith(begin))
    return next(found, None)


def _not_due(case: _Case) -> Iterator[Reason]:
    task, error = case.task, last_line(case.task.error)
    if case.wait_s <= 0:
        return
    at = f"{show_instant(task.expected_time)}, in {show_duration(case.wait_s)}"
    if task.due <= case.now:
        cause, ago = deferral_of(task.error) or "deferred", show_duration(case.late_s)
        text = (
            f"It was due {ago} ago, and no worker could run it: {error}. The next try is at {at}."
        )
        yield Reason(cause, text, _DEFERRED[cause][1])
    elif task.runs and error:
        text = f"Attempt {task.runs} failed: {error}. Retry {task.runs} is due at {at}."
        yield Reason("retry", text, f"To run it now: delaytasks reschedule {task.id} --delay 0")
    else:
        yield Reason("future", f"It is due at {at}, by the clock of the database.")


def _unserved(case: _Case) -> Iterator[Reason]:
    task = case.task
    reason = unserved(task.queue, task.tag, case.workers, case.settings.namespace)
    if reason is not None and reason.code != deferral_of(task.error):  # the row has told it
        yield reason


def _no_key(case: _Case) -> Iterator[Reason]:
    body = case.task.body_json
    name = name_in(body) if is_encrypted(body) else None
    if name is None or name in names_of(case.settings.encryption_keys):
        return
    if deferral_of(case.task.error) != "no_key":
        yield Reason(
            "no_key_here",
            f"Its body begins with {body[: len(PREFIX)]} and needs the key {name}, which "
            "this process does not have.",
            "Check that the workers have it (delaytasks_encryption_keys).",
        )


def _due(case: _Case) -> Iterator[Reason]:
    task, swept_s, settings = case.task, case.swept_s, case.settings
    sentence, lost = f"It is due since {show_duration(case.late_s)}", ""
    if task.lapses:
        times = count(task.lapses, "time")
        lost = f"; {times} in a row the worker died or lost its lease while the task ran"
    is_swept = swept_s is not None and swept_s <= settings.self_sweep_s
    if case.late_s > settings.grace_s:
        if busy := all_busy(task.queue, case.workers, long_running(case.store, case.now)):
            yield busy
            return
        if not is_swept:
            ago = "" if swept_s is None else show_duration(swept_s)
            swept = f"the last sweep was {ago} ago" if ago else "there was no sweep yet"
            text = f"{sentence}, and no sweep looks for overdue tasks: {swept}{lost}."
            yield Reason("no_sweep", text, "Check that beat and a worker run.")
            return
    yield Reason("due", f"{sentence}, and a worker should take it soon{lost}.")


def _transport(case: _Case) -> Iterator[Reason]:
    """Ask the broker and the timer, if the task waits for them now."""
    settings, timer, horizon_s = case.settings, case.runtime.redis_timer, case.settings.horizon_s
    is_due_soon = horizon_s is None or case.wait_s <= horizon_s
    if case.task.status is Status.HELD or not (settings.uses_broker and is_due_soon):
        return
    limit_s = settings.publish_limit_s
    error = broker_error(case.runtime.celery, limit_s)
    if error is not None:
        yield Reason(
            "broker_down",
            f"The broker does not answer: {error}. Until it does, each worker reads the tasks of "
            f"its own queues from the table, every {show_duration(settings.self_sweep_s)}.",
            "Bring the broker back.",
        )
    if timer is not None and timer.counts([case.task.queue]) is None:
        yield Reason(
            "timer_down",
            f"The Redis of the timer does not answer: no answer within {limit_s:g} s. Until it "
            "does, the sweep finds the task when it is overdue.",
            "Bring this Redis back (delaytasks_timer).",
        )


def _expired(case: _Case) -> Iterator[Reason]:
    max_late_s = case.task.max_late_s
    if max_late_s is not None and case.late_s > max_late_s:
        yield Reason(
            "expired",
            f"It has expired: it may be {show_duration(max_late_s)} late. The worker that takes it "
            "cancels it instead of running it.",
            f"To run it nevertheless: delaytasks reschedule {case.task.id} --delay 0",
        )


# -- a task that runs or has ended ----------------------------------------------------------------


def _running(case: _Case) -> Iterator[Reason]:
    task, until = case.task, case.task.lease_until
    end = "(unknown)" if until is None else show_instant(until)
    if until is not None and until < case.now:
        yield Reason(
            "lease_over",
            f"The worker process {task.worker} died or lost its lease at {end}. "
            "The next sweep gives the task to another worker.",
            "" if case.swept_s is not None else "Check that beat or a worker runs.",
        )
        return
    sentence = f"It runs{_begun(task)}; its lease lasts until {end}."
    if task.cancel_request:
        yield Reason("running", f"{sentence} A caller has asked it to stop.")
    else:
        remedy = f"To ask it to stop: delaytasks cancel {task.id} --running"
        yield Reason("running", sentence, remedy)


def _done(case: _Case) -> Iterator[Reason]:
    yield Reason("done", f"It is done: it ran{_begun(case.task)}.")


def _failed(case: _Case) -> Iterator[Reason]:
    task = case.task
    times = f" after {count(task.runs, 'attempt')}" if task.runs > 1 else ""
    text = f"It failed{times}{_at(task.update_time)}: {last_line(task.error)}."
    yield Reason("failed", text, f"To run it again: delaytasks rerun {task.id}")


def _cancelled(case: _Case) -> Iterator[Reason]:
    task, entry = case.task, _cancelled_by(case)
    by = "" if entry is None else f" by {entry.actor} (entry {entry.id} of the log)"
    error = last_line(task.error)
    yield Reason(
        "cancelled",
        f"It was cancelled{_at(task.update_time)}{by}{f': {error}' if error else ''}.",
        f"To run it nevertheless: delaytasks rerun {task.id}",
        "" if entry is None else entry.actor,
    )


_OF_STATUS = {
    Status.RUNNING: _running,
    Status.DONE: _done,
    Status.FAILED: _failed,
    Status.CANCELLED: _cancelled,
}


def _at(instant: datetime | None) -> str:
    return "" if instant is None else f" at {show_instant(instant)}"


def _cancelled_by(case: _Case) -> Any:
    """Return the log entry of the action that has cancelled the task."""
    task, a = case.task, case.store.schema.audit.c
    if task.update_time is None:
        return None
    query = select(a.id, a.actor).order_by(a.id.desc())
    if (task.cancel_request or ASKED) != ASKED:
        return case.first(query.where(a.id == task.cancel_request))  # with other tasks
    # By a person in the console. The ids of the entries contain their times, so the primary key
    # leads to those of that time.
    near = min(first_id(task.update_time), MAX_ID - IDS_AROUND)
    is_mine = a.filter.contains(f'"id":"{task.id}"', autoescape=True)
    is_near = a.id >= near - IDS_AROUND, a.id < near + IDS_AROUND
    return case.first(query.where(*is_near, a.action == "cancel_task", a.changed > 0, is_mine))


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


def _recurring(case: _Case) -> Iterator[Reason]:
    """Name the recurring schedule that has made the task."""
    match = _RECURRING_KEY.fullmatch(case.task.key or "")
    if match is None:
        return
    r = case.store.schema.recurring.c
    columns = r.name, r.timing, r.is_paused, r.next_at
    found = case.first(select(*columns).where(r.name == match[1], r.tag == case.task.tag))
    if found is None:
        return
    name, timing, is_paused, next_at = found
    then = "it has no further occurrence"
    if is_paused:
        then = "it is paused"
    elif next_at is not None:
        then = f"the next occurrence without a task is at {show_instant(next_at)}"
    text = f"It is a task of the recurring schedule {name} ({timing}); {then}."
    remedy = f"To see its next occurrences: delaytasks recurring list {quote(name)} --next 5"
    yield Reason("recurring", text, remedy, name)


# -- why the overdue tasks of a queue and a tag have not begun ------------------------------------


def why_late(
    queue: str,
    tag: str,
    cause: str | None,
    workers: Sequence[RegisteredWorker],
    policies: Sequence[Policy],
    namespace: str,
    running: Sequence[LongRunning],
) -> Reason:
    """Return the most important reason why the tasks of a queue and a tag have not begun.

    `cause` is the code of the deferral by a worker; None if no worker has deferred them.
    """
    own = [each for each in policies if each.name == (tag if each.kind == "tag" else queue)]
    for policy in own:
        if policy.is_paused:
            return Reason("paused", f"The {policy.kind} {policy.name} is paused.")
    if reason := unserved(queue, tag, workers, namespace):
        return reason
    if cause is not None:
        fact, remedy = _DEFERRED[cause]
        fact = fact.format(tag=tag)
        return Reason(cause, f"{fact[0].upper()}{fact[1:]}.", remedy)
    if any(policy.kind == "tag" and policy.has_limits for policy in own):
        return Reason("limit", f"The tag {tag} has limits, and its tasks wait for each other.")
    busy = all_busy(queue, workers, running)
    return busy or Reason("due", "They wait for a worker of the queue to be free.")
