"""The part of `stats` and `check` about late tasks, and about databases that can lose tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.cli.output import cell, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.core.masking import mask_url

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.routing.shard import Shard

#: Groups of late tasks (by queue and tag) in the result, those with the most tasks.
MOST = 20


def late_tasks(delays: DelayTasks, shard: Shard) -> list[dict[str, Any]]:
    """Return the late tasks of a shard by queue and tag, with the reason for the delay."""
    from delaytasks.core.why_late import why_late
    from delaytasks.maintenance.sweeper import SILENT_SWEEPS
    from delaytasks.storage.facts import FactReader
    from delaytasks.storage.stats import Stats

    settings, store = delays.settings, shard.store
    groups = Stats(store.database, store.schema).late(settings.grace_s, MOST)
    if not groups:
        return []
    now = store.tasks.now()
    workers = FactReader(store, settings, SILENT_SWEEPS * settings.sweep_s).workers(now)
    found = []
    for late in groups:
        reason = why_late(late, workers, store.policies.of(late.tag, late.queue))
        found.append(
            {
                "shard": shard.number,
                "queue": late.queue,
                "tag": late.tag,
                "tasks": late.tasks,
                "oldest": show_instant(late.oldest),
                "late_s": round(max((now - late.oldest).total_seconds(), 0.0), 3),
                "code": reason.code,
                "why": reason.text,
            }
        )
    return found


def print_late(found: list[dict[str, Any]]) -> None:
    print_table(
        ["queue", "tag", "late tasks", "by", "why"],
        [[f["queue"], f["tag"], f["tasks"], show_duration(f["late_s"]), f["why"]] for f in found],
        folded="queue tag why",
    )


def replication_of(shard: Shard) -> dict[str, Any] | None:
    """Return how the database of a shard replicates; None if it does not."""
    from delaytasks.storage.replication import replication

    found = replication(shard.store.database)
    return None if found is None else found._asdict()


def warnings_of(delays: DelayTasks) -> list[str]:
    """Return the problems that do not prevent a deployment."""
    warnings = []
    for shard in delays.shards:
        where = f"shard {shard.number}: " if len(delays.shards) > 1 else ""
        try:
            found_late = late_tasks(delays, shard)
        except StoreError as error:
            found_late = []  # the role may read tasks, but not the tables of workers and policies
            warnings.append(f"{where}late tasks are unknown: {error}")
        for late in found_late:
            if late["code"] not in ("due", "limit", "paused"):
                warnings.append(
                    f"{where}{late['tasks']:,} late tasks of the tag {late['tag']} "
                    f"in the queue {late['queue']}: {late['why']}"
                )
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
            url = mask_url(shard.store.database.url.render_as_string(hide_password=True))
            warnings.append(f"{where}{url}: {found['problem']} ({found['facts']})")
    return warnings


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {cell(warning, 1000)}", fg="yellow")
