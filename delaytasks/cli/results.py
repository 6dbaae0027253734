"""Prints what operations return: as one JSON document, as a sentence, or as a table."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from delaytasks.cli.context import Cli
from delaytasks.cli.output import (
    BAD,
    GOOD,
    NOTHING,
    cell,
    count,
    print_json,
    print_table,
    say,
    sentence,
    show_instant,
)
from delaytasks.model.filters import LogEntry
from delaytasks.model.inputs import show_from_now
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import some_values
from delaytasks.operate.operations import document_of
from delaytasks.recurring.definition import RecurringSchedule

#: What is said of an operation that lists nothing.
_EMPTY = {"limit": "Nothing is paused, nothing is limited.", "log": "No operations yet."}


def print_result(cli: Cli, operation: str, result: Any, done: str) -> None:
    """Print what an operation has returned. `done` is what it has done, as a participle."""
    if cli.is_json:
        print_json(document_of(result))
        return
    now = cli.runtime.clock.now()
    match result:
        case []:
            cli.note(_EMPTY[operation])
        case [Policy(), *_]:
            _print_policies(result)
        case [LogEntry(), *_]:
            _print_log(result, now)
        case Policy():
            say(_policy_text(result))
        case RecurringSchedule():
            at = None if done == "removed" else result.next_at
            following = "" if at is None else f"; next occurrence {show_instant(at)}"
            say(f"{done} recurring schedule {cell(result.name)} ({cell(result.tag)}){following}")
            if done == "removed" and result.is_declared:
                cli.note("Workers whose code declares it add it again. To stop it, pause it.")
        case DelayedTask():
            say(sentence(result, done, now))
            cli.note_broker_away()


def _print_policies(policies: list[Policy]) -> None:
    print_table(
        "kind,name,paused,held,running,at once,each key,rate,since,actor".split(","),
        [
            [
                policy.kind,
                policy.name,
                (_end_of(policy) or "yes", "yellow") if policy.is_paused else NOTHING,
                policy.held or 0,
                policy.running or 0,
                policy.concurrency,
                policy.concurrency_per_key,
                policy.rate_text,
                policy.update_time,
                policy.updated_by,
            ]
            for policy in policies
        ],
        folded="name actor",
        extra="since",
    )


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


_STATE_COLOURS = {"done": GOOD, "failed": BAD, "stopped": "yellow", "running": "cyan"}


def _print_log(entries: list[LogEntry], now: datetime) -> None:
    print_table(
        "id,started,actor,action,filter,state,seen,matched,changed,refused".split(","),
        [
            [
                str(entry.id),
                entry.started_at,
                entry.actor,
                entry.action,
                _filter_text(entry.filter),
                (entry.state, _STATE_COLOURS.get(entry.state, "")),
                show_from_now(entry.seen_at, now),
                entry.matched,
                entry.changed,
                entry.refused,
            ]
            for entry in entries
        ],
        folded="actor filter",
        extra="seen",
    )


def _filter_text(filter: dict[str, Any]) -> str:
    """Return a filter for the table, which has only the first of many ids. `--json` has all."""
    if "ids" in filter:
        filter = {**filter, "ids": some_values(filter["ids"])}
    return json.dumps(filter, ensure_ascii=False)
