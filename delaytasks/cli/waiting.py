"""The part of `stats` and `check` about late tasks, and about databases that can lose tasks."""

from __future__ import annotations

from typing import Any

from delaytasks.cli.output import cell, count, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.client import DelayTasks
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.operations.overdue import ExplainedGroup, explain_overdue
from delaytasks.routing.shard import Shard
from delaytasks.storage.replication import replication
from delaytasks.wiring import wiring_of


def late_json(group: ExplainedGroup) -> dict[str, Any]:
    """Return a group of late tasks as JSON values."""
    return {
        "shard": group.shard,
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


def replication_of(shard: Shard) -> dict[str, Any] | None:
    """Return how the database of a shard replicates; None if it does not."""
    found = replication(shard.store.database)
    return None if found is None else found._asdict()


def warnings_of(delays: DelayTasks) -> list[str]:
    """Return the problems that do not prevent a deployment."""
    warnings = []
    shards = wiring_of(delays).shards
    for shard in shards:
        where = f"shard {shard.number}: " if len(shards) > 1 else ""
        try:
            overdue = explain_overdue(shard, delays.settings)
        except StoreError as error:
            overdue = []  # the role may read tasks, but not the tables of workers and policies
            warnings.append(f"{where}late tasks are unknown: {error}")
        warnings += [
            f"{where}{count(group.tasks, 'late task')} of the tag {group.tag} "
            f"in the queue {group.queue}: {group.reason.text}"
            for group in overdue
            if not group.is_expected
        ]
        try:
            unusable = list(shard.policies.current().unusable.values())
        except StoreError:
            unusable = []  # the late tasks have reported it
        warnings += [
            f"{where}the limits of {each.kind} {each.name} are not kept: {each.unusable}"
            for each in unusable
        ]
        try:
            found = replication_of(shard)
        except StoreError as error:
            warnings.append(f"{where}its replication is unknown: {error}")
            continue
        if found is not None and found["problem"] is not None:
            url = shard.store.database.shown_url
            warnings.append(f"{where}{url}: {found['problem']} ({found['facts']})")
    return warnings


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {cell(warning, 1000)}", fg="yellow")
