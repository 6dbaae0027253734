"""Explain why a task that is NOT_COMPLETE or HELD waits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from shlex import quote
from typing import Any

from delaytasks.core.durations import show_duration
from delaytasks.core.encryption import PREFIX, is_encrypted, name_in
from delaytasks.core.policies import Policy, is_limit
from delaytasks.core.reasons import Facts, Reason, instant_text
from delaytasks.core.states import Status
from delaytasks.core.task_json import iso
from delaytasks.core.text import DEFERRALS, count, last_line
from delaytasks.core.why_unserved import unserved

_REMEDIES = {
    "no_processor": "Import the module of the processor in a worker of the queue.",
    "no_key": "Give the workers the key (delaytasks_encryption_keys).",
    "no_time_limits": "Start a worker of the queue with -P prefork.",
    "newer_body": "Deploy the new code to the workers.",
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
        if policy.is_paused:
            by = f" by {policy.updated_by}" if policy.updated_by else ""
            since, at = "", policy.update_time
            if at is not None:
                ago = show_duration((facts.now - at).total_seconds())
                since = f" since {instant_text(at)} ({ago})"
            yield Reason(
                "paused",
                f"The {policy.kind} {policy.name} is paused{by}{since}.",
                f"To resume it: delaytasks resume --{policy.kind} {quote(policy.name)}",
                {
                    "kind": policy.kind,
                    "name": policy.name,
                    "since": iso(policy.update_time),
                    "actor": policy.updated_by,
                },
            )


def _limited(facts: Facts) -> Iterator[Reason]:
    task, policies = facts.task, facts.policies
    limited = next((each for each in policies if each.kind == "tag" and each.has_limits), None)
    if facts.is_in_waitlist or (limited is not None and _is_at_limit(facts, limited)):
        yield _limit(facts, limited)
    elif task.status is Status.HELD and not any(policy.is_paused for policy in policies):
        yield Reason(
            "held", "It is HELD, and nothing holds it. A sweep releases it within about a minute."
        )


def _limit(facts: Facts, policy: Policy | None) -> Reason:
    task = facts.task
    if policy is None:
        return Reason(
            "limit",
            f"It waits for the limit of the tag {task.tag}: the limit was removed a moment ago.",
        )
    sentence = f"It waits for the limit of the tag {task.tag}: {_limits(policy, facts)}"
    if facts.waitlist_tasks:
        sentence += f". Its waitlist has {count(facts.waitlist_tasks, 'task')}"
    values: dict[str, Any] = {
        "tag": task.tag,
        "concurrency": policy.concurrency,
        "running": facts.running,
        "key_concurrency": policy.key_concurrency,
        "concurrency_key": task.concurrency_key,
        "running_of_key": facts.running_of_key,
        "rate": policy.rate_text,
        "waitlist_tasks": facts.waitlist_tasks,
    }
    remedy = f"To change the limit: delaytasks policy set --tag {quote(task.tag)}"
    return Reason("limit", f"{sentence}.", remedy, values)


def _is_at_limit(facts: Facts, limited: Policy) -> bool:
    is_due = facts.task.status is Status.NOT_COMPLETE and facts.wait_s <= 0
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
    task = facts.task
    if facts.wait_s <= 0:
        return
    at = f"{instant_text(task.expected_time)}, in {show_duration(facts.wait_s)}"
    values: dict[str, Any] = {
        "expected_time": iso(task.expected_time),
        "wait_s": round(facts.wait_s, 3),
    }
    if task.due <= facts.now:
        error, cause = last_line(task.error), deferral_of(task.error) or "deferred"
        yield Reason(
            cause,
            f"It was due {show_duration(facts.late_s)} ago, and no worker could run it: {error}. "
            f"The next try is at {at}.",
            _REMEDIES.get(cause, ""),
            {**values, "due_time": iso(task.due), "late_s": round(facts.late_s, 3), "error": error},
        )
    elif task.attempts and task.error:
        error = last_line(task.error)
        yield Reason(
            "retry",
            f"Attempt {task.attempts} failed: {error}. Retry {task.attempts} is due at {at}.",
            f"To run it now: delaytasks reschedule {task.id} --delay 0",
            {**values, "attempts": task.attempts, "error": error},
        )
    else:
        yield Reason("future", f"It is due at {at}, by the clock of the database.", "", values)


def deferral_of(error: str | None) -> str | None:
    """Return the code of the reason for a deferral, from the error that the worker wrote."""
    return next(
        (code for begin, code in DEFERRALS.items() if error and error.startswith(begin)), None
    )


def _key(facts: Facts) -> Iterator[Reason]:
    body = facts.task.body_json
    if is_encrypted(body) and deferral_of(facts.task.error) != "no_key":
        name = name_in(body)
        if name not in facts.keys:
            yield Reason(
                "no_key_here",
                f"Its body begins with {body[: len(PREFIX)]} and needs the key {name}, which "
                "this process does not have.",
                "Check that the workers have it (delaytasks_encryption_keys).",
                {"key": name},
            )


# -- due ------------------------------------------------------------------------------------------


def _due(facts: Facts) -> Reason:
    task = facts.task
    sentence = f"It is due since {show_duration(facts.late_s)}"
    values: dict[str, Any] = {
        "due_time": iso(task.due),
        "late_s": round(facts.late_s, 3),
        "swept_s": None if facts.swept_s is None else round(facts.swept_s, 3),
        "lapses": task.lapses,
    }
    lost = ""
    if task.lapses:
        times = count(task.lapses, "time")
        lost = f"; {times} in a row the worker died or lost its lease while the task ran"
    is_swept = facts.swept_s is not None and facts.swept_s <= facts.self_sweep_s
    if facts.late_s > facts.grace_s and not is_swept:
        swept = "there was no sweep yet"
        if facts.swept_s is not None:
            swept = f"the last sweep was {show_duration(facts.swept_s)} ago"
        return Reason(
            "no_sweep",
            f"{sentence}, and no sweep looks for overdue tasks: {swept}{lost}.",
            "Check that beat and a worker run.",
            values,
        )
    return Reason("due", f"{sentence}, and a worker should take it soon{lost}.", "", values)


def _transport(facts: Facts) -> Iterator[Reason]:
    broker, timer = facts.transport
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
            "Bring this Redis back (delaytasks_redis_url).",
            {"error": timer},
        )


def _expired(facts: Facts) -> Iterator[Reason]:
    expires_s, due = facts.task.expires_s, facts.task.due
    if expires_s is None or facts.late_s <= expires_s:
        return
    yield Reason(
        "expired",
        f"It has expired: it may be {show_duration(expires_s)} late. The worker that takes it "
        "cancels it instead of running it.",
        f"To run it nevertheless: delaytasks reschedule {facts.task.id} --delay 0",
        {"expires_s": expires_s, "expired_at": iso(due + timedelta(seconds=expires_s))},
    )
