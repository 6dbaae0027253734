"""The text of what operations return: a sentence or a table."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from delaytasks.cli.context import Cli
from delaytasks.cli.output import BAD, GOOD, NOTED, NOTHING, Part, Table, cell, sentence
from delaytasks.model.filters import LogEntry
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import count, some_values
from delaytasks.operate.operations import Operation, document_of
from delaytasks.operate.texts import show_from_now, show_instant
from delaytasks.recurring.definition import RecurringSchedule

#: What is said of an operation that lists nothing.
_EMPTY = {"limit": "Nothing is paused, nothing is limited.", "log": "No operations yet."}
_STATE_COLOURS = {"done": GOOD, "failed": BAD, "stopped": NOTED, "running": "cyan"}


def answer_result(cli: Cli, operation: Operation, result: Any) -> None:
    """Print what an operation has returned."""
    cli.answer(document_of(result), *_parts(result, operation.done, cli.runtime.clock.now()))
    match result:
        case []:
            cli.note(_EMPTY[operation.name])
        case RecurringSchedule(is_declared=True) if operation.done == "removed":
            cli.note("Workers whose code declares it add it again. To stop it, pause it.")
        case DelayedTask():
            cli.note_broker_away()


def _parts(result: Any, done: str, now: datetime) -> list[Part]:
    match result:
        case [Policy(), *_]:
            columns = "kind,name,paused,held,running,at once,each key,rate,since,actor"
            rows = [_policy_row(policy) for policy in result]
            return [Table(columns, rows, folded="name,actor", extra="since")]
        case [LogEntry(), *_]:
            columns = "id,started,actor,action,filter,state,seen,matched,changed,refused"
            rows = [_log_row(entry, now) for entry in result]
            return [Table(columns, rows, folded="actor,filter", extra="seen")]
        case Policy():
            return [_policy_text(result)]
        case RecurringSchedule():
            at = None if done == "removed" else result.next_at
            following = "" if at is None else f"; next occurrence {show_instant(at)}"
            name, tag = cell(result.name), cell(result.tag)
            return [f"{done} recurring schedule {name} ({tag}){following}"]
        case DelayedTask():
            return [sentence(result, done, now)]
    return []


def _policy_row(policy: Policy) -> list[Any]:
    paused = (_end_of(policy) or "yes", NOTED) if policy.is_paused else NOTHING
    limits = policy.concurrency, policy.concurrency_per_key, policy.rate_text
    tasks = policy.held or 0, policy.running or 0
    return [
        policy.kind,
        policy.name,
        paused,
        *tasks,
        *limits,
        policy.update_time,
        policy.updated_by,
    ]


def _policy_text(policy: Policy) -> str:
    state = f"paused {_end_of(policy) or 'until resumed'}" if policy.is_paused else "not paused"
    text = f"{policy.kind} {cell(policy.name)} is {state}"
    if policy.held is not None:
        text += f"; held: {count(policy.held, 'task')}"
    if policy.has_limits:
        limits = {
            "at once": policy.concurrency,
            "at once of each key": policy.concurrency_per_key,
            "begin": policy.rate_text,
        }
        shown = ", ".join(f"{value} {name}" for name, value in limits.items() if value is not None)
        text += f"\nlimits: {shown}; running: {count(policy.running or 0, 'task')}"
    return text


def _end_of(policy: Policy) -> str:
    """Return when the pause ends, or an empty text."""
    return "" if policy.paused_until is None else f"until {show_instant(policy.paused_until)}"


def _log_row(entry: LogEntry, now: datetime) -> list[Any]:
    filter = entry.filter
    if "ids" in filter:  # the JSON document has all of them
        filter = {**filter, "ids": some_values(filter["ids"])}
    return [
        str(entry.id),
        entry.started_at,
        entry.actor,
        entry.action,
        json.dumps(filter, ensure_ascii=False),
        (entry.state, _STATE_COLOURS.get(entry.state, "")),
        show_from_now(entry.seen_at, now),
        entry.matched,
        entry.changed,
        entry.refused,
    ]
