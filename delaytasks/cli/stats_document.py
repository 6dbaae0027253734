"""The document that `stats` prints."""

from __future__ import annotations

import platform
from datetime import datetime
from typing import Any

from delaytasks.cli.config import broker_url
from delaytasks.cli.context import Cli
from delaytasks.cli.deployment import read_deployment
from delaytasks.cli.times import show_instant
from delaytasks.cli.waiting import late_json
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.core.states import Status
from delaytasks.core.text import installed_version, mask_url
from delaytasks.core.workers import RegisteredWorker
from delaytasks.operations.overdue import ExplainedGroup
from delaytasks.operations.state import DatabaseState, DeploymentState, SweepState
from delaytasks.operations.verdict import verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.statistics.reading import gather_on_time
from delaytasks.storage import migrations

#: Policies in the document. `policy list` lists all of them.
POLICIES = 100


def gather(cli: Cli) -> dict[str, Any]:
    delays = cli.delays
    state = read_deployment(delays)
    policies = sorted(state.policies, key=lambda policy: not policy.is_paused)
    workers = [worker_json(state.now, worker) for worker in state.workers]
    broker = _broker(delays, state)
    return {
        "now": show_instant(state.now),
        "verdict": verdict_of(state).as_json(),
        **_counts(state),
        "late": [_late(cli, group) for group in state.late],
        "overdue": _overdue(state),
        "expired_leases": state.expired_leases,
        "on_time": gather_on_time(delays.statistics, runtime_of(delays).registry),
        "workers": workers,
        "lost_workers": [
            {**worker.as_json(), "lost_s": _age_s(state.now, worker.lost_at)}
            for worker in state.lost
        ],
        "sweeps": [_sweep(sweep, state.services.uses_broker) for sweep in state.sweeps],
        "policies": [policy.as_json() for policy in policies[:POLICIES]],
        "policy_counts": {
            "all": len(policies),
            "paused": sum(policy.is_paused for policy in policies),
            "limited": sum(policy.has_limits for policy in policies),
        },
        "broker": broker,
        "timer": _timer(delays, workers, broker),
        "database": _database(cli, state.database),
        "versions": {
            **{
                name: installed_version(name) or "(not installed)"
                for name in ("delaytasks", "celery", "sqlalchemy")
            },
            "python": platform.python_version(),
        },
    }


def _late(cli: Cli, group: ExplainedGroup) -> dict[str, Any]:
    document = late_json(group)
    return {**document, "why": cli.hints.rewrite(document["why"])}


def _database(cli: Cli, state: DatabaseState) -> dict[str, Any]:
    """Return the address of the database, and its answers to further questions."""
    document: dict[str, Any] = {
        "url": state.url,
        "server": state.server,
        "revision": None,
        "head": migrations.head(),
        "error": None if state.error is None else str(state.error),
    }
    if state.error is None:
        try:
            document["revision"] = migrations.current(*cli.tables)
        except StoreError as error:
            document["error"] = str(error)
    return document


def _counts(state: DeploymentState) -> dict[str, Any]:
    """Return the number of tasks of each status, and the statuses whose number is an estimate."""
    found = {} if state.tables is None else state.tables.counts
    return {
        "counts": {status.name: state.count(status) for status in Status},
        "estimated": [status.name for status, each in found.items() if each.is_estimate],
    }


def _overdue(state: DeploymentState) -> dict[str, Any]:
    """Return the sum of the overdue tasks, and the oldest one."""
    oldest = state.oldest
    return {
        "count": state.overdue,
        "oldest": oldest and show_instant(oldest),
        "late_s": oldest and _age_s(state.now, oldest),
    }


def _age_s(now: datetime, instant: datetime) -> float:
    return round(max((now - instant).total_seconds(), 0.0), 3)


def worker_json(now: datetime, worker: RegisteredWorker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "age_s": round(worker.age_s, 3),
        "is_alive": worker.is_alive,
        "up_s": _age_s(now, worker.started_at),
        "pool": worker.pool,
        "concurrency": worker.concurrency,
        "busy": worker.busy,
        "version": worker.version,
        "queues": worker.queues,
        "tags": worker.tags and sorted(worker.tags),
        "clock_offset_s": worker.clock_offset_s,
        **{name: s and round(s, 3) for name, s in worker.services._asdict().items()},
    }


def _sweep(sweep: SweepState, is_armed: bool) -> dict[str, Any]:
    """Return a sweep. Without a broker no rows are armed."""
    return {
        "sweep_partition": sweep.partition,
        "age_s": sweep.age_s and round(sweep.age_s, 3),
        "is_late": sweep.is_late,
        "armed_until": show_instant(sweep.armed_until) if sweep.armed_until and is_armed else None,
    }


def _broker(delays: DelayTasks, state: DeploymentState) -> dict[str, Any]:
    """Return the URL of the broker, and whether it answers."""
    error, uses_broker = state.services.broker_error, state.services.uses_broker
    is_up = error is None if uses_broker else None  # without a broker, nothing was asked
    return {"url": broker_url(runtime_of(delays).celery), "is_up": is_up, "error": error}


def _timer(
    delays: DelayTasks, workers: list[dict[str, Any]], broker: dict[str, Any]
) -> dict[str, Any]:
    """Return the timer. For `redis`, it counts the tasks of each queue that wait or were taken."""
    if not delays.settings.uses_broker:
        return {"name": "direct", "url": None, "is_up": True, "queues": {}}
    name, timer = delays.settings.timer, runtime_of(delays).redis_timer
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
