"""`delaytasks stats`: the state of a deployment as text or as a JSON document."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, Hints, pass_cli
from delaytasks.cli.output import (
    BAD,
    GOOD,
    NOTHING,
    Cell,
    cell,
    coloured,
    print_fields,
    print_json,
    print_table,
    say,
    show_instant,
)
from delaytasks.cli.setup import broker_url
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import show_duration
from delaytasks.core.states import Status
from delaytasks.core.text import installed_version, mask_url
from delaytasks.core.workers import RegisteredWorker
from delaytasks.operations.state import (
    DatabaseState,
    DeploymentState,
    ExplainedGroup,
    ServicesState,
    SweepState,
    read_state,
)
from delaytasks.operations.verdict import verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.statistics.reading import WINDOWS, gather_on_time, recent_failures
from delaytasks.storage import migrations
from delaytasks.timers.publisher import broker_error

# -- Reads the state of the deployment for the commands that show or judge it ---------------------


def read_deployment(delays: DelayTasks) -> DeploymentState:
    """Read the tables, and ask the broker whether it answers.

    Raises
    ------
    StoreError
        If no database answers.
    """
    wiring, settings = runtime_of(delays), delays.settings
    uses_broker, error = wiring.direct_timer is None, None
    if uses_broker:
        queue = wiring.publisher.queue(settings.default_queue)
        error = broker_error(wiring.celery, queue, settings.publish_limit_s)
    services = ServicesState(settings.timer_kind, uses_broker, error)
    now = wiring.clock.now()
    state = read_state(wiring, recent_failures, services, now)
    if state.database.error is not None:
        raise state.database.error
    return state


# -- The document that `stats` prints -------------------------------------------------------------


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
    name, timer = delays.settings.timer_kind, runtime_of(delays).redis_timer
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


LEVEL_STYLES = {"good": {"fg": GOOD}, "note": {}, "warning": {"fg": "yellow"}, "bad": {"fg": BAD}}
#: Paused tags and queues in one line of text.
NAMED = 10


@click.command(cls=Command)
@pass_cli
def stats(cli: Cli) -> None:
    """Print counts, late tasks, workers and sweeps.

    \b
    delaytasks stats
    """
    found = gather(cli)
    if cli.is_json:
        print_json(found)
    else:
        _print(found, cli.hints)
    if found["database"]["error"]:
        sys.exit(1)


def _print(found: dict[str, Any], hints: Hints) -> None:
    about = dict.fromkeys(found["estimated"], "about ")
    print_table(
        ("status", "tasks"),
        [
            [coloured(Status[name]), f"{about.get(name, '')}{number:,}"]
            for name, number in found["counts"].items()
        ],
        right=["tasks"],
    )
    say("")
    _print_verdict(found["verdict"])
    say("")
    print_fields(_fields(found, hints))
    say("")
    if found["late"]:
        print_late(found["late"])
        say("")
    if found["on_time"]:
        print_on_time(found["on_time"])
        say("")
    _print_sweeps(found["sweeps"])
    say("")
    if found["workers"] or found["lost_workers"]:
        _print_workers(found["workers"], found["lost_workers"])
    if not found["workers"]:
        is_direct = found["timer"]["name"] == "direct"
        how = "delaytasks drain --forever" if is_direct else "celery -A … worker"
        say(hints.rewrite(f"no workers; start one with: {how}"), fg="yellow")


def print_late(found: list[dict[str, Any]]) -> None:
    print_table(
        ["queue", "tag", "late tasks", "by", "why"],
        [[f["queue"], f["tag"], f["tasks"], show_duration(f["late_s"]), f["why"]] for f in found],
        folded="queue tag why",
    )


def _print_verdict(verdict: dict[str, Any]) -> None:
    say(verdict["headline"], **LEVEL_STYLES[verdict["level"]])
    for problem in verdict["problems"]:
        say(f"- {cell(problem['text'], 1000)}", **LEVEL_STYLES[problem["level"]])


def _alarm(text: str, is_bad: object) -> Cell:
    return (text, BAD if is_bad else "")


def _fields(found: dict[str, Any], hints: Hints) -> Iterator[tuple[str, Cell]]:
    """Yield the lines between the tables."""
    expired = found["expired_leases"]
    yield "overdue", _overdue_cell(found["overdue"])
    yield "lease over", _alarm(f"{expired:,}", expired)
    if paused := _paused_text(found, hints):
        yield "paused", (paused, "yellow")
    yield "database", _database_cell(found["database"], hints)
    yield "broker", _broker_cell(found["broker"])
    yield "timer", _timer_cell(found["timer"])
    yield "versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield "now", found["now"]


def _overdue_cell(overdue: dict[str, Any]) -> Cell:
    late = f"{overdue['count']:,}"
    if overdue["count"]:
        late += f", the oldest since {overdue['oldest']}, {show_duration(overdue['late_s'])} ago"
    return _alarm(late, overdue["count"])


def _until(policy: dict[str, Any]) -> str:
    end = policy["paused_until"]
    return "" if end is None else f", until {show_instant(datetime.fromisoformat(end))}"


def _paused_text(found: dict[str, Any], hints: Hints) -> str:
    paused = [each for each in found["policies"] if each["is_paused"]][:NAMED]
    names = [
        f"{each['kind']} {cell(each['name'])} ({each['held']:,} held{_until(each)})"
        for each in paused
    ]
    more = found["policy_counts"]["paused"] - len(paused)
    if more:
        names.append(f"and {more:,} more; {hints.command} policy list shows them")
    return ", ".join(names)


def _database_cell(database: dict[str, Any], hints: Hints) -> Cell:
    url = database["url"]
    if database["error"]:
        return _alarm(f"{url}: down ({cell(database['error'])})", True)
    text = f"{url} ({database['server']}), revision {database['revision'] or 'unknown'}"
    if database["revision"] != database["head"]:
        text += f", this version has {database['head']}; run: {hints.command} db upgrade"
    return text


def _broker_cell(broker: dict[str, Any]) -> Cell:
    states = {True: "up", False: f"down ({cell(broker['error'])})", None: "not used"}
    return _alarm(f"{broker['url']}: {states[broker['is_up']]}", broker["is_up"] is False)


def _timer_cell(timer: dict[str, Any]) -> Cell:
    state = "up" if timer["is_up"] else "down"
    text = f"{timer['name']}, {timer['url'] or 'the database'}: {state}"
    near = [f"{name} {n['waiting'] + n['taken']:,}" for name, n in timer["queues"].items()]
    return _alarm(f"{text}; near tasks: {', '.join(near)}" if near else text, not timer["is_up"])


def _print_sweeps(sweeps: list[dict[str, Any]]) -> None:
    rows: list[list[Cell]] = []
    for sweep in sweeps:
        name = sweep["sweep_partition"]
        last = (_ago(sweep["age_s"]), BAD if sweep["is_late"] else GOOD)
        rows.append([name, last, sweep["armed_until"]])
    print_table(("sweep", "last", "armed until"), rows)


def _print_workers(workers: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
    rows = []
    for worker in workers:
        seen = (_ago(worker["age_s"]), GOOD if worker["is_alive"] else BAD)
        offset = f"{worker['clock_offset_s'] * 1000:+.1f}ms"
        rows.append(_worker_row(worker, seen, show_duration(worker["up_s"]), offset))
    for gone in lost:
        seen = (f"lost {_ago(gone['lost_s'])}", BAD)
        rows.append(_worker_row(gone, seen, NOTHING, NOTHING))
    print_table(
        ("worker", "seen", "up for", "pool", "busy", "queues", "clock offset", "version"),
        rows,
        folded="worker queues",
    )


def _worker_row(worker: dict[str, Any], seen: Cell, up_for: Cell, offset: Cell) -> list[Cell]:
    queues, busy = ", ".join(worker["queues"]), worker.get("busy")
    processes = worker["concurrency"] if busy is None else f"{busy}/{worker['concurrency']}"
    version = worker.get("version") or NOTHING
    return [worker["name"], seen, up_for, worker["pool"], processes, queues, offset, version]


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{show_duration(seconds)} ago"


#: The range whose error budget is shown.
BUDGET_OF = "day"


def print_on_time(shares: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each tag."""
    rows: list[list[Cell]] = []
    for one in shares:
        promised = "" if one["promised_s"] is None else show_duration(one["promised_s"])
        windows = [_share(one[name], one["target"]) for name in WINDOWS]
        rows.append([one["tag"], promised, *windows, _budget(one[BUDGET_OF])])
    ranges = [f"last {name}" for name in WINDOWS]
    heads = ["on time", "within", *ranges, f"error budget left, {BUDGET_OF}"]
    print_table(heads, rows, folded="on time")


def _share(numbers: dict[str, Any] | None, target: float) -> Cell:
    if numbers is None:
        return "–"
    text = f"{numbers['share']:.2%} ({numbers['late']:,} late)"
    return (text, BAD if numbers["share"] < target else "")


def _budget(numbers: dict[str, Any] | None) -> Cell:
    if numbers is None:
        return "–"
    left = numbers["budget_left"]
    return (f"{left:.0%}", BAD if left < 0 else "")
