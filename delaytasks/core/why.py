"""Explain why a task has not run, from facts that `storage/facts.py` has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.durations import show_duration
from delaytasks.core.encryption import BOUND_PREFIX, is_encrypted, name_in
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.policies import Policy, is_limit
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import DEFERRALS, last_line

#: A clock offset up to this many seconds is not mentioned.
CLOCK_TOLERANCE_S = 1.0
#: Names in one sentence.
MOST_NAMES = 5


class Reason(NamedTuple):
    """One reason: `code` for programs, `text` for people."""

    code: str
    text: str


class WorkerFacts(NamedTuple):
    """A worker, as its row in the registry describes it."""

    name: str
    is_alive: bool
    age_s: float
    queues: Sequence[str]
    #: None if the worker has not published its tags.
    tags: frozenset[str] | None

    def serves(self, queue: str) -> bool:
        return ALL_QUEUES in self.queues or queue in self.queues


class Facts(NamedTuple):
    """The facts on which the reasons for one task depend."""

    task: DelayTask
    #: The time of the database, whose clock decides what is due.
    now: datetime
    #: Seconds by which the clock of this machine is ahead of the database's clock.
    clock_offset_s: float
    workers: Sequence[WorkerFacts]
    #: The policies of the task's tag and queue.
    policies: Sequence[Policy] = ()
    #: Whether the task is in the waitlist of its tag's limit.
    is_in_waitlist: bool = False
    #: Running tasks of the tag.
    running: int = 0
    #: Running tasks of the tag with the task's concurrency key.
    running_of_key: int = 0
    #: Seconds since the last sweep; None if there was none.
    swept_s: float | None = None
    #: Seconds after the due time from which the sweep takes care of a task.
    grace_s: float = 1.0
    #: Seconds after which a sweep is late.
    self_sweep_s: float = 10.0
    #: The names of the encryption keys that this process has.
    keys: Sequence[str] = ()


def why(facts: Facts) -> list[Reason]:
    """Return the reasons why the task has not run, the most important one first.

    For a task that runs or has ended, the only reason is its status.
    """
    task = facts.task
    if task.status in _ENDED:
        return [_ENDED[task.status](facts)]
    if task.status is Status.RUNNING:
        return [_running(facts)]
    if task.status not in (Status.NOT_COMPLETE, Status.HELD):
        name = task.status.name
        text = f"Its status is {name}, which delaytasks does not know: no worker takes it."
        return [Reason("unknown_status", text)]
    waits = list(_not_due(facts))
    reasons = [*_paused(facts), *_limited(facts), *waits]
    no_worker = unserved(task.queue, task.tag, facts.workers)
    if no_worker is not None and no_worker.code not in {reason.code for reason in waits}:
        reasons.append(no_worker)
    reasons += _key(facts)
    if not reasons:
        reasons = [_due(facts)]
    return reasons + list(_clock(facts))


def as_json(reasons: Sequence[Reason]) -> list[dict[str, Any]]:
    return [reason._asdict() for reason in reasons]


# -- ended, or running ----------------------------------------------------------------------------


def _done(facts: Facts) -> Reason:
    return Reason("done", f"It is done: it ran{_begun(facts.task)}.")


def _failed(facts: Facts) -> Reason:
    task = facts.task
    error, again = last_line(task.error), f"delaytasks retry {task.id}"
    return Reason("failed", f"It failed{_times(task.attempts)}: {error}. To run it again: {again}")


def _cancelled(facts: Facts) -> Reason:
    cause = f": {last_line(facts.task.error)}" if facts.task.error else ""
    return Reason("cancelled", f"It was cancelled at {_instant(facts.task.update_time)}{cause}.")


_ENDED = {Status.DONE: _done, Status.FAILED: _failed, Status.CANCELLED: _cancelled}


def _running(facts: Facts) -> Reason:
    task, until = facts.task, facts.task.lease_until
    if until is not None and until < facts.now:
        text = (
            f"The worker process {task.worker} died or lost its lease at {_instant(until)}. "
            "The next sweep gives the task to another worker."
        )
        return Reason("lease_over", text)
    return Reason("running", f"It runs{_begun(task)}; its lease lasts until {_instant(until)}.")


def _begun(task: DelayTask) -> str:
    began = task.execution_time
    if began is None:
        return ""
    late_s = (began - task.due).total_seconds()
    where = f" on {task.worker}" if task.worker else ""
    if late_s <= 0:
        return where
    return f"{where} since {_instant(began)}, {show_duration(late_s)} after it was due"


# -- held -----------------------------------------------------------------------------------------


def _paused(facts: Facts) -> Iterator[Reason]:
    for policy in facts.policies:
        if policy.is_paused:
            by = f" by {policy.updated_by}" if policy.updated_by else ""
            since = "" if policy.update_time is None else f" since {_instant(policy.update_time)}"
            text = (
                f"The {policy.kind} {policy.name} is paused{by}{since}. "
                f"To go on: delaytasks resume --{policy.kind} {policy.name}"
            )
            yield Reason("paused", text)


def _limited(facts: Facts) -> Iterator[Reason]:
    task, policies = facts.task, facts.policies
    limited = next((each for each in policies if each.kind == "tag" and each.has_limits), None)
    if facts.is_in_waitlist or (limited is not None and _is_at_limit(facts, limited)):
        limit = _limits(limited, facts) if limited else "the limit was removed a moment ago"
        yield Reason("limit", f"It waits for the limit of the tag {task.tag}: {limit}.")
    elif task.status is Status.HELD and not any(policy.is_paused for policy in policies):
        text = "It is HELD, and nothing holds it. A sweep releases it within about a minute."
        yield Reason("held", text)


def _is_at_limit(facts: Facts, limited: Policy) -> bool:
    task = facts.task
    is_due = task.status is Status.NOT_COMPLETE and task.expected_time <= facts.now
    limit = limited.concurrency if is_limit(limited.concurrency) else None
    return is_due and facts.running >= (limit or 2**63)


def _limits(policy: Policy, facts: Facts) -> str:
    texts = []
    if policy.concurrency is not None:
        texts.append(f"{policy.concurrency} may run at the same time, and {facts.running} do")
    if policy.key_concurrency is not None and facts.task.concurrency_key is not None:
        key = facts.task.concurrency_key
        texts.append(
            f"{policy.key_concurrency} of the key {key} may run, and {facts.running_of_key} do"
        )
    if policy.rate_text is not None:
        texts.append(f"its rate is {policy.rate_text}")
    return "; ".join(texts) or "its capacity is used"


# -- not due, or deferred -------------------------------------------------------------------------


def _not_due(facts: Facts) -> Iterator[Reason]:
    task, wait_s = facts.task, (facts.task.expected_time - facts.now).total_seconds()
    if wait_s <= 0:
        return
    at = f"{_instant(task.expected_time)}, in {show_duration(wait_s)}"
    if task.due <= facts.now:
        late = show_duration((facts.now - task.due).total_seconds())
        cause = deferral_of(task.error) or "deferred"
        text = f"It was due {late} ago, and no worker could run it: {last_line(task.error)}."
        yield Reason(cause, f"{text} The next try is at {at}.")
    elif task.attempts and task.error:
        text = f"Attempt {task.attempts} failed: {last_line(task.error)}."
        yield Reason("retry", f"{text} Retry {task.attempts} is due at {at}.")
    else:
        yield Reason("future", f"It is due at {at}, by the clock of the database.")


def deferral_of(error: str | None) -> str | None:
    """Return the code of the reason for a deferral, from the error that the worker wrote."""
    return next(
        (code for begin, code in DEFERRALS.items() if error and error.startswith(begin)), None
    )


# -- no worker takes it ---------------------------------------------------------------------------


def unserved(queue: str, tag: str, workers: Sequence[WorkerFacts]) -> Reason | None:
    """Return why no live worker can run tasks of this queue and tag; None if one probably can."""
    serving = [worker for worker in workers if worker.serves(queue)]
    alive = [worker for worker in serving if worker.is_alive]
    if not alive:
        text = f"No live worker serves the queue {queue}"
        if serving:
            last = min(serving, key=lambda worker: worker.age_s)
            text += f"; {last.name}, which did, was seen {show_duration(last.age_s)} ago"
        elif others := sorted(
            {name for worker in workers if worker.is_alive for name in worker.queues}
        ):
            text += f"; live workers serve {_names(others)}"
        return Reason("no_worker", text + ". Start a worker that serves it (-Q).")
    if all(worker.tags is not None and tag not in worker.tags for worker in alive):
        names = _names([worker.name for worker in alive])
        text = f"No worker of the queue {queue} has a processor for the tag {tag} ({names})"
        return Reason("no_processor", f"{text}; is its module imported?")
    return None


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _key(facts: Facts) -> Iterator[Reason]:
    body = facts.task.body_json
    if is_encrypted(body) and deferral_of(facts.task.error) != "no_key":
        name = name_in(body)
        if name not in facts.keys:
            text = f"Its body begins with {body[: len(BOUND_PREFIX)]} and needs the key {name}"
            yield Reason("no_key_here", f"{text}, which this process does not have.")


def _due(facts: Facts) -> Reason:
    task, late_s = facts.task, (facts.now - facts.task.due).total_seconds()
    text = f"It is due since {show_duration(late_s)}, and a worker should take it soon"
    if task.lapses:
        text += f"; {task.lapses} times in a row the worker died or lost its lease while it ran"
    if late_s > facts.grace_s and (facts.swept_s is None or facts.swept_s > facts.self_sweep_s):
        swept = (
            "there was no sweep yet"
            if facts.swept_s is None
            else f"the last was {show_duration(facts.swept_s)} ago"
        )
        return Reason("no_sweep", f"{text}; but no sweep runs: {swept}. Do beat and a worker run?")
    return Reason("due", text + ".")


def _clock(facts: Facts) -> Iterator[Reason]:
    offset_s = facts.clock_offset_s
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        ahead = "ahead of" if offset_s > 0 else "behind"
        text = f"The clock of this machine is {show_duration(offset_s)} {ahead} "
        yield Reason("clock", f"{text}the clock of the database, which decides what is due.")


def _times(attempts: int) -> str:
    return f" after {attempts} attempts" if attempts > 1 else ""


def _instant(instant: datetime | None) -> str:
    return (
        "(unknown)"
        if instant is None
        else instant.isoformat(timespec="seconds").replace("+00:00", "Z")
    )
