"""The part of `stats` and `check` about late tasks, and about databases in the wrong role."""

from __future__ import annotations

from typing import Any

from delaytasks.cli.output import cell, count, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import show_duration
from delaytasks.operations.overdue import ExplainedGroup, explain_overdue
from delaytasks.runtime import runtime_of
from delaytasks.storage.stats import Stats


def late_json(group: ExplainedGroup) -> dict[str, Any]:
    """Return a group of late tasks as JSON values."""
    return {
        "queue": group.queue,
        "tag": group.tag,
        "tasks": group.tasks,
        "oldest": show_instant(group.oldest),
        "late_s": round(group.late_s, 3),
        "code": group.reason.code,
        "why": group.reason.text,
    }


def print_late(found: list[dict[str, Any]]) -> None:
    print_table(
        ["queue", "tag", "late tasks", "by", "why"],
        [[f["queue"], f["tag"], f["tasks"], show_duration(f["late_s"]), f["why"]] for f in found],
        folded="queue tag why",
    )


def warnings_of(delays: DelayTasks) -> list[str]:
    """Return the problems that do not prevent a deployment."""
    warnings, runtime = [], runtime_of(delays)
    try:
        overdue = explain_overdue(runtime.store, delays.settings)
    except StoreError as error:
        overdue = []  # the role may read tasks, but not the tables of workers and policies
        warnings.append(f"late tasks are unknown: {error}")
    warnings += [
        f"{count(group.tasks, 'late task')} of the tag {group.tag} in the queue {group.queue}: "
        f"{group.reason.text}"
        for group in overdue
        if not group.is_expected
    ]
    try:
        problem = Stats(runtime.store.database, runtime.store.schema).standby_problem()
    except StoreError as error:
        problem = f"its replication is unknown: {error}"
    if problem is not None:
        warnings.append(f"{runtime.store.database.shown_url}: {problem}")
    return warnings


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {cell(warning, 1000)}", fg="yellow")
