"""The document that `stats` prints."""

from __future__ import annotations

import platform
from datetime import datetime
from importlib import metadata
from typing import Any

from delaytasks.cli.config import broker_url
from delaytasks.cli.context import Cli, shown_url
from delaytasks.cli.on_time import gather_on_time
from delaytasks.cli.times import show_instant
from delaytasks.cli.waiting import late_json, replication_of
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.core.masking import mask_url
from delaytasks.core.policies import Policy
from delaytasks.core.states import Status
from delaytasks.operations.overdue import explain_overdue
from delaytasks.routing.shard import Shard
from delaytasks.storage import migrations
from delaytasks.storage.stats import Stats
from delaytasks.timers.broker_status import broker_error
from delaytasks.wiring import wiring_of

#: Policies in the document. `policy list` lists all of them.
POLICIES = 100


def gather(cli: Cli) -> dict[str, Any]:
    delays = cli.delays
    found, databases = list[dict[str, Any]](), list[dict[str, Any]]()
    for shard in delays.shards:
        database = _database(shard)
        databases.append(database)
        try:
            found.append(_numbers(delays, shard))
            database |= _answers(cli, shard)
        except StoreError as error:
            if len(delays.shards) == 1:
                raise
            database["error"] = str(error)

    def all_of(name: str) -> list[Any]:
        return [each for numbers in found for each in numbers[name]]

    # Each worker is known in each database.
    workers = list({worker["name"]: worker for worker in all_of("workers")}.values())
    broker, policies = _broker(delays), _policies(delays)
    return {
        "now": show_instant(wiring_of(delays).clock.now()),
        **_counts(found),
        "late": sorted(all_of("late"), key=lambda late: -late["tasks"]),
        "overdue": _overdue(found),
        "expired_leases": sum(numbers["expired_leases"] for numbers in found),
        "on_time": gather_on_time(delays),
        "workers": workers,
        "sweeps": all_of("sweeps"),
        "policies": [policy.as_json() for policy in policies[:POLICIES]],
        "policy_counts": {
            "all": len(policies),
            "paused": sum(policy.is_paused for policy in policies),
            "limited": sum(policy.has_limits for policy in policies),
        },
        "broker": broker,
        "timer": _timer(delays, workers, broker),
        "databases": databases,
        "versions": {
            **{name: _version(name) for name in ("delaytasks", "celery", "sqlalchemy")},
            "python": platform.python_version(),
        },
    }


def _database(shard: Shard) -> dict[str, Any]:
    """Return what is known without asking the database."""
    return {
        "url": shown_url(shard.store),
        "server": None,
        "revision": None,
        "head": migrations.head(),
        "replication": None,
        "error": None,
    }


def _counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of tasks of each status, and the statuses whose number is an estimate."""
    counts = {status: [numbers["counts"][status] for numbers in found] for status in Status}
    return {
        "counts": {s.name: sum(each.rows for each in counts[s]) for s in Status},
        "estimated": [s.name for s in Status if any(each.is_estimate for each in counts[s])],
    }


def _overdue(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the overdue tasks, and the oldest one of all databases."""
    overdue = [numbers["overdue"] for numbers in found if numbers["overdue"]["count"]]
    nothing = {"oldest": None, "late_s": None}
    oldest = max(overdue, key=lambda each: float(each["late_s"]), default=nothing)
    return {**oldest, "count": sum(each["count"] for each in overdue)}


def _numbers(delays: DelayTasks, shard: Shard) -> dict[str, Any]:
    """Return the counts, workers and sweeps of one database."""
    settings, store = delays.settings, shard.store
    numbers, now = Stats(store.database, store.schema), store.tasks.now()
    is_armed = wiring_of(delays).direct_timer is None  # a direct timer arms no rows

    def age(instant: datetime) -> float:
        return round(max((now - instant).total_seconds(), 0.0), 3)

    overdue = numbers.overdue(settings.grace_s)
    return {
        "counts": numbers.counts(),
        "late": [late_json(group) for group in explain_overdue(shard, settings)]
        if overdue.tasks
        else [],
        "overdue": {
            "count": overdue.tasks,
            "oldest": overdue.oldest and show_instant(overdue.oldest),
            "late_s": overdue.oldest and age(overdue.oldest),
        },
        "expired_leases": numbers.expired_leases(settings.lease_s),
        "workers": [
            {
                "name": worker.name,
                "age_s": round(worker.age_s, 3),
                "is_alive": worker.is_alive,
                "up_s": age(worker.started_at),
                "pool": worker.pool,
                "concurrency": worker.concurrency,
                "queues": worker.queues,
                "tags": worker.tags and sorted(worker.tags),
                "clock_offset_s": worker.clock_offset_s,
                **{name: s and round(s, 3) for name, s in worker.services._asdict().items()},
            }
            for worker in store.workers.registered(now, settings.silent_s)
        ],
        "sweeps": [
            {
                "shard": shard.number,
                "sweep_partition": swept.sweep_partition,
                "age_s": swept.at and age(swept.at),
                "is_late": swept.is_late(now, settings.self_sweep_s),
                "armed_until": show_instant(swept.armed_until)
                if swept.armed_until and is_armed
                else None,
            }
            for swept in numbers.sweeps(settings.sweep_partitions)
        ],
    }


def _policies(delays: DelayTasks) -> list[Policy]:
    """Return the policies, the paused ones first."""
    try:
        return sorted(delays.policies(), key=lambda policy: not policy.is_paused)
    except StoreError:
        return []  # no database answers, and each one's error is in the document


def _answers(cli: Cli, shard: Shard) -> dict[str, Any]:
    """Return what the database itself reports."""
    return {
        "server": Stats(shard.store.database, shard.store.schema).server(),
        "revision": migrations.current(*cli.tables(shard.store)),
        "replication": replication_of(shard),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _broker(delays: DelayTasks) -> dict[str, Any]:
    """Return the URL of the broker, and whether it answers."""
    wiring = wiring_of(delays)
    if wiring.direct_timer is not None:  # this deployment has no use for a broker
        return {"url": broker_url(wiring.celery), "is_up": None, "error": None}
    queue = wiring.publisher.queue(delays.settings.default_queue)
    error = broker_error(wiring.celery, queue, delays.settings.publish_limit_s)
    return {"url": broker_url(wiring.celery), "is_up": error is None, "error": error}


def _timer(
    delays: DelayTasks, workers: list[dict[str, Any]], broker: dict[str, Any]
) -> dict[str, Any]:
    """Return the timer. For `redis`, it counts the tasks of each queue that wait or were taken."""
    if not delays.settings.uses_broker:
        return {"name": "direct", "url": None, "is_up": True, "queues": {}}
    name, timer = delays.settings.timer, wiring_of(delays).redis_timer
    if timer is None:
        return {"name": name, "url": broker["url"], "is_up": broker["is_up"], "queues": {}}
    served = {queue for worker in workers for queue in worker["queues"]}
    counts = timer.counts(sorted({delays.settings.default_queue, *served}))
    return {
        "name": name,
        "url": mask_url(timer.link.url),
        "is_up": counts is not None,
        "queues": {
            name: {"waiting": waiting, "taken": taken}
            for name, (waiting, taken) in (counts or {}).items()
        },
    }
