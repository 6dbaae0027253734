"""`stats`: how this deployment does."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from datetime import datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from delaytasks.cli.config import broker_url
from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli, shown_url
from delaytasks.cli.output import (
    NOTHING,
    Cell,
    cell,
    coloured,
    print_fields,
    print_json,
    print_table,
    say,
)
from delaytasks.cli.times import show_instant
from delaytasks.cli.waiting import late_tasks, print_late, replication_of
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.core.masking import mask_url
from delaytasks.core.states import Status

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.core.policies import Policy
    from delaytasks.sharding.shard import Shard

BAD, GOOD = "red", "green"
#: Policies in the JSON document, and paused ones that a line of text names; `policy list` shows all of them.
POLICIES, NAMED = 100, 10


@click.command(epilog=EXIT_CODES)
@pass_cli
def stats(cli: Cli) -> None:
    """Print counts, what is late, workers and sweeps.

    \b
    delaytasks stats
    """
    found = _gather(cli)
    if cli.is_json:
        print_json(found)
    else:
        _print(found, cli.command)
    if any(database["error"] for database in found["databases"]):
        sys.exit(1)


def _print(found: dict[str, Any], command: str) -> None:
    about = dict.fromkeys(found["estimated"], "about ")
    counts = found["counts"].items()
    rows = ((coloured(Status[name]), f"{about.get(name, '')}{count:,}") for name, count in counts)
    print_table(("status", "tasks"), rows, right="tasks")
    say("")
    _print_health(found, command)
    say("")
    if found["late"]:
        print_late(found["late"])
        say("")
    _print_sweeps(found["sweeps"])
    say("")
    is_direct = found["timer"]["name"] == "direct"
    _print_workers(
        found["workers"], f"{command} drain --forever" if is_direct else "celery -A … worker"
    )


# -- gather ---------------------------------------------------------------------------------------


def _gather(cli: Cli) -> dict[str, Any]:
    from delaytasks.storage import migrations

    delays, head = cli.delays, migrations.head()
    found, databases = [], []
    for shard, store in zip(delays.shards, cli.stores, strict=True):
        database: dict[str, Any] = {
            "url": shown_url(store),
            "server": None,
            "revision": None,
            "head": head,
        }
        database |= {"replication": None, "error": None}
        try:
            found.append(_numbers(delays, shard))
            database |= _versions(delays, shard)
            database["replication"] = replication_of(shard)
        except StoreError as error:
            if len(delays.shards) == 1:
                raise
            database["error"] = str(error)
        databases.append(database)
    overdue = [numbers["overdue"] for numbers in found if numbers["overdue"]["count"]]
    oldest = max(overdue, key=lambda each: each["late_s"], default={"oldest": None, "late_s": None})
    # Each worker is known in each database.
    workers = list(
        {worker["name"]: worker for numbers in found for worker in numbers["workers"]}.values()
    )
    broker, policies = _broker(delays), _policies(delays)
    return {
        "now": show_instant(delays.clock.now()),
        "counts": {
            status.name: sum(numbers["counts"][status].rows for numbers in found)
            for status in Status
        },
        "estimated": [
            status.name
            for status in Status
            if any(numbers["counts"][status].is_estimate for numbers in found)
        ],
        "late": sorted(
            (late for numbers in found for late in numbers["late"]), key=lambda late: -late["tasks"]
        ),
        "overdue": {**oldest, "count": sum(each["count"] for each in overdue)},
        "lapsed": sum(numbers["lapsed"] for numbers in found),
        "workers": workers,
        "sweeps": [sweep for numbers in found for sweep in numbers["sweeps"]],
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


def _numbers(delays: DelayTasks, shard: Shard) -> dict[str, Any]:
    from delaytasks.maintenance.sweeper import SILENT_SWEEPS
    from delaytasks.storage.stats import Stats

    settings, store = delays.settings, shard.store
    numbers, now = Stats(store.database, store.schema), store.tasks.now()
    is_armed = delays.direct_timer is None  # else nobody is told beforehand

    def age(instant: datetime) -> float:
        return round(max((now - instant).total_seconds(), 0.0), 3)

    overdue = numbers.overdue(settings.grace_s)
    return {
        "counts": numbers.counts(),
        "late": late_tasks(delays, shard) if overdue.tasks else [],
        "overdue": {
            "count": overdue.tasks,
            "oldest": overdue.oldest and show_instant(overdue.oldest),
            "late_s": overdue.oldest and age(overdue.oldest),
        },
        "lapsed": numbers.lapsed(settings.lease_s),
        "workers": [
            {
                "name": worker["name"],
                "age_s": age(worker["seen_at"]),
                "is_alive": age(worker["seen_at"]) <= SILENT_SWEEPS * settings.sweep_s,
                "up_s": age(worker["started_at"]),
                "pool": worker["pool"],
                "concurrency": worker["concurrency"],
                "queues": worker["queues"],
                "tags": worker["tags"] and sorted(worker["tags"]),
                "clock_offset_s": worker["clock_offset_us"] / 1e6,
            }
            for worker in store.workers.alive()
        ],
        "sweeps": [
            {
                "shard": shard.number,
                "house": swept.house,
                "age_s": swept.at and age(swept.at),
                "is_late": swept.at is None or age(swept.at) > settings.self_sweep_s,
                "armed_until": show_instant(swept.armed_until)
                if swept.armed_until and is_armed
                else None,
            }
            for swept in numbers.sweeps(settings.houses)
        ],
    }


def _policies(delays: DelayTasks) -> list[Policy]:
    """What is paused comes first."""
    try:
        return sorted(delays.policies(), key=lambda policy: not policy.is_paused)
    except StoreError:
        return []  # no database answers, which is told of each


def _versions(delays: DelayTasks, shard: Shard) -> dict[str, Any]:
    from delaytasks.storage import migrations
    from delaytasks.storage.stats import Stats

    settings, store = delays.settings, shard.store
    revision = migrations.current(
        store.database, settings.table_prefix, settings.table_schema or None
    )
    return {"server": Stats(store.database, store.schema).server(), "revision": revision}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _broker(delays: DelayTasks) -> dict[str, Any]:
    """Whether the broker answers now. The timer's own flag says only what this process has met."""
    from delaytasks.timers.broker_link import bounded_connection

    app, error = delays.celery, None
    if delays.direct_timer is not None:
        return {"url": broker_url(app), "is_up": None, "error": None}  # nothing of ours asks it
    try:
        with bounded_connection(app, delays.settings.publish_limit_s) as connection:
            error = _lost_queue(delays, connection)
    except Exception as reason:  # each transport has errors of its own, and all mean the same
        error = f"{type(reason).__name__}: {reason}"
    return {"url": broker_url(app), "is_up": error is None, "error": error}


def _lost_queue(delays: DelayTasks, connection: Any) -> str | None:
    """What a broker that answers says of a default queue whose node is down: no message gets through."""
    from delaytasks.timers.broker_link import is_home_node_down

    try:
        name = delays.publisher.queue(delays.settings.default_queue).name
        connection.default_channel.queue_declare(queue=name, passive=True)
    except connection.channel_errors as reason:  # usually that nobody has declared it yet
        return f"{type(reason).__name__}: {reason}" if is_home_node_down(reason) else None
    return None


def _timer(
    delays: DelayTasks, workers: list[dict[str, Any]], broker: dict[str, Any]
) -> dict[str, Any]:
    """Where near tasks wait: with `redis`, how many of each queue, and how many a worker has just taken."""
    if delays.direct_timer is not None:
        return {"name": "direct", "url": None, "is_up": True, "queues": {}}
    timer = delays.redis_timer
    if timer is None:
        return {"name": "eta", "url": broker["url"], "is_up": broker["is_up"], "queues": {}}
    names = sorted(
        {
            delays.settings.default_queue,
            *(queue for worker in workers for queue in worker["queues"]),
        }
    )
    counts = timer.counts(names)
    queues = {name: {"waiting": both[0], "taken": both[1]} for name, both in (counts or {}).items()}
    return {
        "name": "redis",
        "url": mask_url(timer.link.url),
        "is_up": counts is not None,
        "queues": queues,
    }


# -- print ----------------------------------------------------------------------------------------


def _print_health(found: dict[str, Any], command: str) -> None:
    overdue, broker = found["overdue"], found["broker"]
    late = f"{overdue['count']:,}"
    if overdue["count"]:
        late += f", the oldest since {overdue['oldest']}, {show_duration(overdue['late_s'])} ago"
    timer = found["timer"]
    timer_state = (
        f"{timer['name']}, {timer['url'] or 'the database'}: {'up' if timer['is_up'] else 'down'}"
    )
    near = (
        f"{name} {counts['waiting'] + counts['taken']:,}"
        for name, counts in timer["queues"].items()
    )
    if timer["queues"]:
        timer_state += f"; near tasks: {', '.join(near)}"
    broker_state = "up" if broker["is_up"] else f"down ({cell(broker['error'])})"
    if broker["is_up"] is None:
        broker_state = "not used"
    print_fields(
        [
            ("overdue", (late, BAD if overdue["count"] else "")),
            ("lease over", (f"{found['lapsed']:,}", BAD if found["lapsed"] else "")),
            *_paused(found["policies"], found["policy_counts"]["paused"]),
            *(("database", _database(database, command)) for database in found["databases"]),
            (
                "broker",
                (f"{broker['url']}: {broker_state}", BAD if broker["is_up"] is False else ""),
            ),
            ("timer", (timer_state, "" if timer["is_up"] else BAD)),
            (
                "versions",
                ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
            ),
            ("now", found["now"]),
        ]
    )


def _paused(policies: list[dict[str, Any]], total: int) -> list[tuple[str, Cell]]:
    paused = [each for each in policies if each["is_paused"]][:NAMED]
    said = ", ".join(
        f"{each['kind']} {cell(each['name'])} ({each['held']:,} held)" for each in paused
    )
    if total > len(paused):
        said += f", and {total - len(paused):,} more; delaytasks policy list shows them"
    return [("paused", (said, "yellow"))] if paused else []


def _database(database: dict[str, Any], command: str) -> Cell:
    if database["error"]:
        return f"{database['url']}: down ({cell(database['error'], 200)})", BAD
    said = f"{database['url']} ({database['server']}), revision {database['revision'] or 'unknown'}"
    if database["revision"] != database["head"]:
        said += f", this version has {database['head']}; run: {command} db upgrade"
    replication = database["replication"]
    if replication is None or (replication["mode"] == "none" and replication["problem"] is None):
        return said
    said += f"; replication {replication['mode']} ({replication['facts']})"
    return (f"{said}: {replication['problem']}", BAD) if replication["problem"] else said


def _print_sweeps(sweeps: list[dict[str, Any]]) -> None:
    shards = {sweep["shard"] for sweep in sweeps}
    rows = (
        [
            str(sweep["house"]) if len(shards) == 1 else f"{sweep['shard']}/{sweep['house']}",
            (_ago(sweep["age_s"]), BAD if sweep["is_late"] else GOOD),
            sweep["armed_until"] or NOTHING,
        ]
        for sweep in sweeps
    )
    print_table(("sweep", "last", "armed until"), rows)


def _print_workers(workers: list[dict[str, Any]], how: str) -> None:
    if not workers:
        say(f"no workers; start one with: {how}", fg="yellow")
        return
    rows: Iterable[list[Cell]] = (
        [
            cell(worker["name"]),
            (_ago(worker["age_s"]), GOOD if worker["is_alive"] else BAD),
            show_duration(worker["up_s"]),
            cell(worker["pool"]),
            str(worker["concurrency"]),
            cell(", ".join(worker["queues"])),
            f"{worker['clock_offset_s'] * 1000:+.1f}ms",
        ]
        for worker in workers
    )
    print_table(
        ("worker", "seen", "up for", "pool", "processes", "queues", "clock offset"),
        rows,
        folded="worker queues",
    )


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{show_duration(seconds)} ago"
