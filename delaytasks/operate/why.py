"""Explain why a task has not run, or how it ended, from facts that the storage has read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.model.body import PREFIX, name_in
from delaytasks.model.clock import json_fields
from delaytasks.model.inputs import processor_tag, show_duration, show_instant
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask, is_encrypted
from delaytasks.model.text import DEFERRALS, count, last_line, some_values
from delaytasks.model.workers import MOST_NAMES, RegisteredWorker, one_more_worker

if TYPE_CHECKING:
    from delaytasks.operate.state_queries import OverdueGroup

# -- The reasons why a task has not run, or how it ended, and the facts from which they follow ----


class Reason(NamedTuple):
    """One reason, for people and for programs."""

    #: A name that programs compare, such as "paused".
    code: str
    #: The reason in one or two sentences.
    sentence: str
    #: The remedy for an operator; empty if none is needed.
    remedy: str = ""
    #: The values in the sentence.
    facts: Mapping[str, Any] = {}

    @property
    def text(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence} {self.remedy}".rstrip()

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "facts": json_fields(self.facts)}


class ScheduleFacts(NamedTuple):
    """The recurring schedule that has made the task."""

    name: str
    timing: str
    is_paused: bool
    next_at: datetime | None


class AuditFacts(NamedTuple):
    """The log entry of the action that has cancelled the task."""

    id: int
    actor: str


class Facts(NamedTuple):
    """The facts on which the reasons for one task depend."""

    task: DelayedTask
    #: The time of the database, whose clock decides what is due.
    now: datetime
    #: Seconds by which the clock of this machine is ahead of the database's clock.
    clock_offset_s: float
    workers: Sequence[RegisteredWorker]
    #: The policies of the task's tag and queue.
    policies: Sequence[Policy] = ()
    #: Whether the task is in the waitlist of its tag's limit.
    is_in_waitlist: bool = False
    #: The number of tasks in the waitlist of the tag and queue, up to a bound.
    waitlist_tasks: int = 0
    #: Running tasks of the tag.
    running: int = 0
    #: Running tasks of the tag with the task's limit key.
    running_of_key: int = 0
    #: Seconds since the last sweep; None if there was none.
    swept_s: float | None = None
    #: Seconds after the due time from which the sweep takes care of a task.
    grace_s: float = 1.0
    #: Seconds after which a sweep is late.
    self_sweep_s: float = 10.0
    #: The prefix of the queues in the broker.
    namespace: str = "delaytasks"
    #: The names of the encryption keys that this process has.
    keys: Sequence[str] = ()
    schedule: ScheduleFacts | None = None
    cancelled_by: AuditFacts | None = None
    #: The errors of the servers that bring due tasks to the workers. None if they answer, or if the
    #: task is not due soon: then they are not asked.
    broker_error: str | None = None
    timer_error: str | None = None

    @property
    def wait_s(self) -> float:
        """Seconds until the next try; negative if it should have begun."""
        return round((self.task.expected_time - self.now).total_seconds(), 3)

    @property
    def late_s(self) -> float:
        """Seconds since the due time."""
        return round((self.now - self.task.due).total_seconds(), 3)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task has not run, or how it ended.

    Attributes
    ----------
    id
        The id of the task. None if the task was named by its key and its database does not answer.
    task
        The task as it was read. None if its database does not answer.
    reasons
        The reasons, the most important one first. There is at least one.
    """

    id: int | None
    task: DelayedTask | None
    reasons: Sequence[Reason]

    def __str__(self) -> str:
        return " ".join(reason.text for reason in self.reasons)


def instant_text(instant: datetime | None) -> str:
    return "(unknown)" if instant is None else show_instant(instant)


# -- Explain why no worker takes the tasks of a queue and a tag -----------------------------------


def unserved(
    queue: str, tag: str, workers: Sequence[RegisteredWorker], namespace: str
) -> Reason | None:
    """Return why no live worker can run tasks of this queue and tag; None if one probably can.

    `namespace` is the prefix of the queues in the broker.
    """
    serving = [worker for worker in workers if worker.serves(queue)]
    alive = [worker for worker in serving if worker.is_alive]
    if not alive:
        return _no_worker(queue, serving, workers, namespace)
    known_as, names = {tag, processor_tag(tag)}, [worker.name for worker in alive]
    if any(worker.tags is None or known_as & worker.tags for worker in alive):
        return None
    return Reason(
        "no_processor",
        f"No worker of the queue {queue} has a processor for the tag {tag} ({_names(names)}).",
        "Import the module of the processor in the worker (Celery's imports or include), or "
        "correct the tag.",
        {"queue": queue, "tag": tag, "workers": names},
    )


def _no_worker(
    queue: str,
    serving: Sequence[RegisteredWorker],
    workers: Sequence[RegisteredWorker],
    namespace: str,
) -> Reason:
    sentence = f"No live worker serves the queue {queue}"
    alive = [worker for worker in workers if worker.is_alive]
    live_queues = sorted({name for worker in alive for name in worker.queues})
    remedy = "Start a worker: celery -A … worker"
    if live_queues:
        remedy = one_more_worker([queue], namespace)
    elif alive:  # -Q of the live workers names none of our queues
        name = quote(f"{namespace}.{queue}")
        more = f"or start one more: celery -A … worker -Q {name}"
        remedy = f"Add {name} to the -Q of a worker, {more}"
    if serving:
        last = min(serving, key=lambda worker: worker.age_s)
        sentence += f"; {last.name}, which did, was seen {show_duration(last.age_s)} ago"
    elif alive:
        served = _names(live_queues) or "no queue of delaytasks"
        sentence += f"; live workers serve {served} ({_names([each.name for each in alive])})"
    elif not workers:
        sentence += "; no worker runs"
    last_seen = {worker.name: round(worker.age_s, 3) for worker in serving}
    values = {"queue": queue, "live_queues": live_queues, "last_seen": last_seen}
    return Reason("no_worker", f"{sentence}.", remedy, values)


def _names(names: Sequence[str]) -> str:
    return some_values(names, MOST_NAMES)


# -- Explain why a task that is NOT_COMPLETE or HELD waits ----------------------------------------


#: For each deferral, the remedy for one task, and the reason why many tasks of a tag are late.
_DEFERRED = {
    "no_processor": (
        "Import the module of the processor in a worker of the queue.",
        "No worker that tried them has a processor for the tag {tag}; is its module imported?",
    ),
    "no_key": (
        "Give the workers the key (delaytasks_encryption_keys).",
        "No worker that tried them has the encryption key of their bodies "
        "(delaytasks_encryption_keys).",
    ),
    "no_time_limits": (
        "Start a worker of the queue with -P prefork.",
        "The tag {tag} has time limits, which need a worker with -P prefork on the queue {queue}.",
    ),
    "newer_body": (
        "Deploy the new code to the workers.",
        "Their bodies are of a newer version of the tag {tag} than the workers' processors: deploy "
        "the new code to the workers.",
    ),
    "deferred": ("", "A worker could not run them, and deferred them."),
}


def why_waiting(facts: Facts) -> list[Reason]:
    """Return the reasons, first those that an operator can end. There is at least one."""
    task = facts.task
    waits = list(_not_due(facts))
    reasons = [*_paused(facts), *_limited(facts), *waits]
    no_worker = unserved(task.queue, task.tag, facts.workers, facts.namespace)
    if no_worker is not None and no_worker.code not in {reason.code for reason in waits}:
        reasons.append(no_worker)
    reasons += _key(facts)
    if not reasons:
        reasons = [_due(facts)]
    return [*reasons, *_transport(facts), *_expired(facts)]


# -- held -----------------------------------------------------------------------------------------


def _paused(facts: Facts) -> Iterator[Reason]:
    for policy in facts.policies:
        if not policy.is_paused:
            continue
        since, until, by = policy.update_time, policy.paused_until, policy.updated_by
        sentence = f"The {policy.kind} {policy.name} is paused"
        if by:
            sentence += f" by {by}"
        if since is not None:
            ago = show_duration((facts.now - since).total_seconds())
            sentence += f" since {instant_text(since)} ({ago})"
        if until is not None:
            sentence += f", until {instant_text(until)}"
        remedy = f"To resume it: delaytasks resume --{policy.kind} {quote(policy.name)}"
        values = {"kind": policy.kind, "name": policy.name, "since": since, "until": until}
        yield Reason("paused", f"{sentence}.", remedy, {**values, "actor": by})


def _limited(facts: Facts) -> Iterator[Reason]:
    task, policies = facts.task, facts.policies
    limited = next((each for each in policies if each.kind == "tag" and each.has_limits), None)
    is_due = task.status is Status.NOT_COMPLETE and facts.wait_s <= 0
    most = (limited and limited.concurrency) or 2**63
    if facts.is_in_waitlist or (is_due and facts.running >= most):
        yield _limit(facts, limited)
    elif task.status is Status.HELD and not any(policy.is_paused for policy in policies):
        yield Reason(
            "held", "It is HELD, and nothing holds it. A sweep releases it within about a minute."
        )


def _limit(facts: Facts, policy: Policy | None) -> Reason:
    task = facts.task
    sentence = f"It waits for the limit of the tag {task.tag}"
    if policy is None:
        return Reason("limit", f"{sentence}: the limit was removed a moment ago.")
    sentence += f": {_limits(policy, facts)}"
    if facts.waitlist_tasks:
        sentence += f". Its waitlist has {count(facts.waitlist_tasks, 'task')}"
    values = {
        "tag": task.tag,
        "concurrency": policy.concurrency,
        "running": facts.running,
        "concurrency_per_key": policy.concurrency_per_key,
        "limit_key": task.limit_key,
        "running_of_key": facts.running_of_key,
        "rate": policy.rate_text,
        "waitlist_tasks": facts.waitlist_tasks,
    }
    remedy = f"To change the limit: delaytasks limit --tag {quote(task.tag)}"
    return Reason("limit", f"{sentence}.", remedy, values)


def _limits(policy: Policy, facts: Facts) -> str:
    texts = []
    if policy.concurrency is not None:
        texts.append(f"{policy.concurrency} may run at the same time, and {facts.running} do")
    if policy.concurrency_per_key is not None and facts.task.limit_key is not None:
        key = facts.task.limit_key
        texts.append(
            f"{policy.concurrency_per_key} of the key {key} may run, and {facts.running_of_key} do"
        )
    if policy.rate_text is not None:
        texts.append(f"its rate is {policy.rate_text}")
    return "; ".join(texts) or "its capacity is used"


# -- not due, or deferred -------------------------------------------------------------------------


def _not_due(facts: Facts) -> Iterator[Reason]:
    task = facts.task
    if facts.wait_s <= 0:
        return
    at = f"{instant_text(task.expected_time)}, in {show_duration(facts.wait_s)}"
    values: dict[str, Any] = {"expected_time": task.expected_time, "wait_s": facts.wait_s}
    error = last_line(task.error)
    if task.due <= facts.now:
        cause, ago = deferral_of(task.error) or "deferred", show_duration(facts.late_s)
        yield Reason(
            cause,
            f"It was due {ago} ago, and no worker could run it: {error}. The next try is at {at}.",
            _DEFERRED[cause][0],
            {**values, "due_time": task.due, "late_s": facts.late_s, "error": error},
        )
    elif task.runs and error:
        yield Reason(
            "retry",
            f"Attempt {task.runs} failed: {error}. Retry {task.runs} is due at {at}.",
            f"To run it now: delaytasks reschedule {task.id} --delay 0",
            {**values, "runs": task.runs, "error": error},
        )
    else:
        yield Reason("future", f"It is due at {at}, by the clock of the database.", "", values)


def deferral_of(error: str | None) -> str | None:
    """Return the code of the reason for a deferral, from the error that the worker wrote."""
    found = (code for code, begin in DEFERRALS.items() if error and error.startswith(begin))
    return next(found, None)


def _key(facts: Facts) -> Iterator[Reason]:
    body = facts.task.body_json
    name = name_in(body) if is_encrypted(body) else None
    if name is None or name in facts.keys or deferral_of(facts.task.error) == "no_key":
        return
    yield Reason(
        "no_key_here",
        f"Its body begins with {body[: len(PREFIX)]} and needs the key {name}, which "
        "this process does not have.",
        "Check that the workers have it (delaytasks_encryption_keys).",
        {"key": name},
    )


# -- due ------------------------------------------------------------------------------------------


def _due(facts: Facts) -> Reason:
    task, swept_s = facts.task, facts.swept_s
    sentence = f"It is due since {show_duration(facts.late_s)}"
    values = {
        "due_time": task.due,
        "late_s": facts.late_s,
        "swept_s": None if swept_s is None else round(swept_s, 3),
        "lapses": task.lapses,
    }
    lost = ""
    if task.lapses:
        times = count(task.lapses, "time")
        lost = f"; {times} in a row the worker died or lost its lease while the task ran"
    is_swept = swept_s is not None and swept_s <= facts.self_sweep_s
    if is_swept or facts.late_s <= facts.grace_s:
        return Reason("due", f"{sentence}, and a worker should take it soon{lost}.", "", values)
    swept = "there was no sweep yet"
    if swept_s is not None:
        swept = f"the last sweep was {show_duration(swept_s)} ago"
    sentence += f", and no sweep looks for overdue tasks: {swept}{lost}."
    return Reason("no_sweep", sentence, "Check that beat and a worker run.", values)


def _transport(facts: Facts) -> Iterator[Reason]:
    broker, timer = facts.broker_error, facts.timer_error
    if broker is not None:
        yield Reason(
            "broker_down",
            f"The broker does not answer: {broker}. Until it does, each worker reads the tasks of "
            f"its own queues from the table, every {show_duration(facts.self_sweep_s)}.",
            "Bring the broker back.",
            {"error": broker},
        )
    if timer is not None:
        yield Reason(
            "timer_down",
            f"The Redis of the timer does not answer: {timer}. Until it does, the sweep finds the "
            "task when it is overdue.",
            "Bring this Redis back (delaytasks_timer).",
            {"error": timer},
        )


def _expired(facts: Facts) -> Iterator[Reason]:
    max_late_s, due = facts.task.max_late_s, facts.task.due
    if max_late_s is None or facts.late_s <= max_late_s:
        return
    yield Reason(
        "expired",
        f"It has expired: it may be {show_duration(max_late_s)} late. The worker that takes it "
        "cancels it instead of running it.",
        f"To run it nevertheless: delaytasks reschedule {facts.task.id} --delay 0",
        {"max_late_s": max_late_s, "expired_at": due + timedelta(seconds=max_late_s)},
    )


#: A clock offset up to this many seconds is not mentioned.
CLOCK_TOLERANCE_S = 1.0


def why(facts: Facts) -> list[Reason]:
    """Return the reasons why the task has not run, the most important one first.

    For a task that runs or has ended, the first reason is its status.
    """
    status = facts.task.status
    if status in _ENDED:
        reasons = [_ENDED[status](facts)]
    elif status is Status.RUNNING:
        reasons = [_running(facts)]
    else:
        reasons = [*why_waiting(facts), *_clock(facts)]
    return [*reasons, *_recurring(facts)]


# -- ended ----------------------------------------------------------------------------------------


def _done(facts: Facts) -> Reason:
    return Reason("done", f"It is done: it ran{_begun(facts.task)}.", "", _run(facts.task))


def _failed(facts: Facts) -> Reason:
    task, error = facts.task, last_line(facts.task.error)
    times = f" after {count(task.runs, 'attempt')}" if task.runs > 1 else ""
    at = "" if task.update_time is None else f" at {instant_text(task.update_time)}"
    return Reason(
        "failed",
        f"It failed{times}{at}: {error}.",
        f"To run it again: delaytasks rerun {task.id}",
        {**_run(task), "error": error},
    )


def _cancelled(facts: Facts) -> Reason:
    task, entry = facts.task, facts.cancelled_by
    at, error = task.update_time, last_line(task.error)
    by = f" by {entry.actor} (entry {entry.id} of the log)" if entry else ""
    values = {"at": at, "actor": entry and entry.actor, "entry": entry and str(entry.id)}
    return Reason(
        "cancelled",
        f"It was cancelled at {instant_text(at)}{by}{f': {error}' if error else ''}.",
        f"To run it nevertheless: delaytasks rerun {task.id}",
        {**values, "error": error or None},
    )


_ENDED = {Status.DONE: _done, Status.FAILED: _failed, Status.CANCELLED: _cancelled}


# -- running --------------------------------------------------------------------------------------


def _running(facts: Facts) -> Reason:
    task, until = facts.task, facts.task.lease_until
    is_asked = bool(task.cancel_request)
    values = {**_run(task), "lease_until": until, "is_asked_to_stop": is_asked}
    if until is not None and until < facts.now:
        return Reason(
            "lease_over",
            f"The worker process {task.worker} died or lost its lease at {instant_text(until)}. "
            "The next sweep gives the task to another worker.",
            "" if facts.swept_s is not None else "Check that beat or a worker runs.",
            values,
        )
    sentence = f"It runs{_begun(task)}; its lease lasts until {instant_text(until)}."
    if is_asked:
        return Reason("running", f"{sentence} A caller has asked it to stop.", "", values)
    remedy = f"To ask it to stop: delaytasks cancel {task.id} --running"
    return Reason("running", sentence, remedy, values)


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
    "entry": "",
    "drain": " (a drain of the queue found it)",
    "waitlist": " (it was in the waitlist of the tag)",
    "unknown": "",
}


def _run(task: DelayedTask) -> dict[str, Any]:
    began = task.execution_time
    late_s = None if began is None else round((began - task.due).total_seconds(), 3)
    values = {"worker": task.worker, "began": began, "late_s": late_s, "runs": task.runs}
    return {**values, "late_start": _late_start(task)}


def _late_start(task: DelayedTask) -> tuple[str, str] | None:
    """Return what the end of the last run has noted; nothing is known of a task that runs."""
    return None if task.status is Status.RUNNING else task.late_start


def _begun(task: DelayedTask) -> str:
    """Return where the task has begun and, if it was late, when."""
    began = task.execution_time
    where = f" on {task.worker}" if task.worker else ""
    if began is None or began <= task.due:
        return "" if began is None else where
    late = show_duration((began - task.due).total_seconds())
    text = f"{where} since {instant_text(began)}, {late} after it was due"
    if (noted := _late_start(task)) is None:
        return text
    brought_by, reason = noted
    return f"{text}, because {LATE_BECAUSE[reason]}{_BROUGHT[brought_by]}"


# -- additional reasons ---------------------------------------------------------------------------


def _clock(facts: Facts) -> Iterator[Reason]:
    offset_s = facts.clock_offset_s
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        ahead = "ahead of" if offset_s > 0 else "behind"
        yield Reason(
            "clock",
            f"The clock of this machine is {show_duration(offset_s)} {ahead} the clock of the "
            "database, which decides what is due.",
            "Nothing has to be done for delaytasks; compare times with those of the database.",
            {"offset_s": round(offset_s, 3)},
        )


def _recurring(facts: Facts) -> Iterator[Reason]:
    schedule = facts.schedule
    if schedule is None:
        return
    next_at = "it has no further occurrence"
    if schedule.is_paused:
        next_at = "it is paused"
    elif schedule.next_at is not None:
        next_at = f"the next occurrence without a task is at {instant_text(schedule.next_at)}"
    yield Reason(
        "recurring",
        f"It is a task of the recurring schedule {schedule.name} ({schedule.timing}); {next_at}.",
        f"To see its next occurrences: delaytasks recurring list {quote(schedule.name)} --next 5",
        schedule._asdict(),
    )


# -- Explain why the overdue tasks of a queue and a tag have not begun ----------------------------


def why_late(
    late: OverdueGroup,
    workers: Sequence[RegisteredWorker],
    policies: Sequence[Policy],
    namespace: str,
) -> Reason:
    """Return the most important reason why the tasks of a queue and a tag have not begun."""
    queue, tag = late.queue, late.tag
    own = [each for each in policies if each.name == (tag if each.kind == "tag" else queue)]
    for policy in own:
        if policy.is_paused:
            return Reason("paused", f"The {policy.kind} {policy.name} is paused.")
    no_worker = unserved(queue, tag, workers, namespace)
    if no_worker is not None:
        return no_worker
    if late.cause is not None:
        return Reason(late.cause, _DEFERRED[late.cause][1].format(tag=tag, queue=queue))
    if any(policy.kind == "tag" and policy.has_limits for policy in own):
        return Reason("limit", f"The tag {tag} has limits, and its tasks wait for each other.")
    return Reason("due", "They wait for a worker of the queue to be free.")
