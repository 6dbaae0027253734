"""`delaytasks status`: the state of a deployment, live, as an exit code, or in the days ahead."""

from __future__ import annotations

import io
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, Hints, check_belongs, pass_cli
from delaytasks.cli.options import DURATION
from delaytasks.cli.output import (
    BAD,
    GOOD,
    LONGEST,
    NOTHING,
    Cell,
    cell,
    coloured,
    count,
    print_fields,
    print_json,
    print_table,
    say,
    show_instant,
)
from delaytasks.cli.setup import broker_url
from delaytasks.client import DelayTasks
from delaytasks.db import migrations
from delaytasks.model.inputs import ALL_QUEUES, show_duration, show_measured, show_offset
from delaytasks.model.moves import Status
from delaytasks.model.text import installed_version, mask_url, one_line
from delaytasks.model.workers import RegisteredWorker
from delaytasks.operate.health import HealthChecks, HealthQuestion
from delaytasks.operate.live import snapshot
from delaytasks.operate.state import DeploymentState, ExplainedGroup, ask_broker, read_state
from delaytasks.operate.state_queries import SweepState
from delaytasks.operate.statistics import WINDOWS, gather_on_time
from delaytasks.operate.verdict import verdict_of
from delaytasks.runtime import runtime_of

# -- Reads the state of the deployment for the commands that show or judge it ---------------------


def read_deployment(delays: DelayTasks) -> DeploymentState:
    """Read the tables, and ask the broker whether it answers.

    Raises
    ------
    StoreError
        If the database does not answer.
    """
    runtime = runtime_of(delays)
    state = read_state(runtime, ask_broker(runtime))
    if state.database.error is not None:
        raise state.database.error
    return state


# -- The document that `status` prints -------------------------------------------------------------


#: Policies in the document. `limit` lists all of them.
POLICIES = 100


def gather(cli: Cli) -> dict[str, Any]:
    delays = cli.delays
    state = read_deployment(delays)
    policies = sorted(state.policies, key=lambda policy: not policy.is_paused)
    live = snapshot(cli.store, delays.settings, state)
    workers = [
        {**worker_json(state.now, each), "running": live.running_of.get(each.name, 0)}
        for each in state.workers
    ]
    services = state.services
    broker = {
        "url": broker_url(runtime_of(delays).celery),
        # Without a broker, nothing was asked.
        "is_up": services.broker_error is None if services.uses_broker else None,
        "error": services.broker_error,
    }
    return {
        "now": show_instant(state.now),
        "verdict": verdict_of(state).as_json(),
        "counts": {status.name: count.rows for status, count in state.counts.items()},
        "estimated": [status.name for status, count in state.counts.items() if count.is_estimate],
        "live": {
            **{name: value for name, value in live.total.as_json().items() if name != "name"},
            "queues": [group.as_json() for group in live.queues],
            "tags": [group.as_json() for group in live.tags],
            "is_capped": live.is_capped,
        },
        "late": [_late(cli, group) for group in state.late],
        "overdue": {
            "count": state.overdue,
            "oldest": state.oldest and show_instant(state.oldest),
            "late_s": state.oldest and _age_s(state.now, state.oldest),
        },
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
        "database": {
            "url": state.database.url,
            "server": state.database.server,
            "revision": migrations.current(*cli.tables),
            "head": migrations.head(),
        },
        "versions": {
            **{
                name: installed_version(name) or "(not installed)"
                for name in ("delaytasks", "celery", "sqlalchemy")
            },
            "python": platform.python_version(),
        },
    }


def _late(cli: Cli, group: ExplainedGroup) -> dict[str, Any]:
    return {
        "queue": group.queue,
        "tag": group.tag,
        "tasks": group.tasks,
        "oldest": show_instant(group.oldest),
        "late_s": round(group.late_s, 3),
        "code": group.reason.code,
        "why": cli.hints.rewrite(group.reason.text),
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


def _timer(
    delays: DelayTasks, workers: list[dict[str, Any]], broker: dict[str, Any]
) -> dict[str, Any]:
    """Return the timer. For `redis`, it counts the tasks of each queue that wait or were taken."""
    if not delays.settings.uses_broker:
        return {"name": "direct", "url": None, "is_up": True, "queues": {}}
    name, timer = delays.settings.timer_kind, runtime_of(delays).redis_timer
    if timer is None:
        return {"name": name, "url": broker["url"], "is_up": broker["is_up"], "queues": {}}
    served = {queue for worker in workers for queue in worker["queues"]} - {ALL_QUEUES}
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
#: Queues, and tags, in a table of text. The document has all of them.
GROUPS_SHOWN = 20
#: Hours in the table of `--ahead`: those that keep the processes busiest. The document has all.
HOURS_SHOWN = 12
#: A lateness from which a number is marked.
MARKED_LATE_S = 1.0
_EXIT_CODES = "Exit codes: 0 answered, or healthy; 1 no answer, or not healthy; 2 wrong usage."
#: The options of each kind of answer, by the option that asks for it.
_BELONG_TO = {
    "--watch": "every",
    "--probe": "live name max_overdue max_sweep_age timeout",
    "--ahead": "processes",
}


@click.command(cls=Command, epilog=_EXIT_CODES)
@click.option("--watch", is_flag=True, help="Renew the view on a terminal until Ctrl-C.")
@click.option("--every", type=DURATION, help="--watch: the time between two reads. [2s]")
@click.option(
    "--probe",
    type=click.Choice(["deployment", "worker", "run", "beat"]),
    is_flag=False,
    flag_value="deployment",
    help="Answer by the exit code whether this is healthy. Without a value: the deployment.",
)
@click.option("--live", is_flag=True, help="--probe: fail only if a restart would help.")
@click.option("--name", help="--probe: the worker of this name. [all of this host]")
@click.option("--max-overdue", type=click.IntRange(0), help="--probe: most overdue tasks. [any]")
@click.option("--max-sweep-age", type=DURATION, help="--probe: the oldest sweep. [three intervals]")
@click.option("--timeout", type=DURATION, help="--probe: for the answer of the database. [5s]")
@click.option("--ahead", type=DURATION, help="Show what becomes due within this time, as 7d.")
@click.option("--processes", type=int, help="--ahead: instead of those of the live workers.")
@pass_cli
def status(
    cli: Cli,
    watch: bool,
    every: timedelta | None,
    probe: str | None,
    ahead: timedelta | None,
    processes: int | None,
    **limits: Any,
) -> None:
    """Show whether tasks run on time: counts, queues, tags, late tasks, workers and sweeps.

    \b
    delaytasks status --watch
    delaytasks status --probe --max-overdue 1000 --max-sweep-age 1m
    delaytasks status --probe worker --live
    delaytasks status --ahead 7d --processes 32

    Each queue and tag has the number of its tasks that run, that are overdue, that are due within a
    minute (soon), and that were due within the last minute and have ended, with their lateness
    (p50, p99).

    With --probe, the deployment is healthy if database and broker answer, the tables have this
    version, a worker lives, a sweep was recent, and each queue with late tasks has a worker. A
    worker (or `run --forever`) of this host is ready under the same conditions except the last,
    if it has reported itself. With --live it is unhealthy only if it has stopped reporting while a
    database answers: a restart does not help against an outage. Beat is healthy if its messages
    have reached a worker recently. The HTTP API and the console have URLs for probes instead.

    --ahead shows what becomes due in each hour, and whether the processes suffice.
    """
    asked = {"--watch": watch, "--probe": probe, "--ahead": ahead}
    given = {"every": every, "processes": processes, **limits}
    if sum(map(bool, asked.values())) > 1:
        raise click.UsageError("--watch, --probe and --ahead exclude each other")
    check_belongs(_BELONG_TO, asked, given)
    if probe is not None:
        _probe(cli, probe, **limits)
    elif ahead is not None:
        _print_ahead(cli, ahead / timedelta(days=1), processes)
    elif watch and not cli.is_json and sys.stdout.isatty():
        _watch(cli, 2.0 if every is None else every.total_seconds())
    else:
        found = gather(cli)
        if cli.is_json:
            print_json(found)
        else:
            _print(found, cli.hints)


# -- `--watch` ------------------------------------------------------------------------------------


class _Screen(io.StringIO):
    """Text for a terminal."""

    def isatty(self) -> bool:
        return True


def _watch(cli: Cli, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                screen = _Screen()
                with redirect_stdout(screen):
                    _print(gather(cli), cli.hints)
                lines = screen.getvalue().splitlines()
                more = len(lines) - console.height
                if more > 0:
                    lines = [*lines[: console.height - 1], f"and {count(more + 1, 'line')} more"]
                live.update(Text.from_ansi("\n".join(lines), no_wrap=True), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        pass  # the way to end this command


# -- `--probe` ------------------------------------------------------------------------------------


def _probe(
    cli: Cli,
    component: str,
    live: bool,
    name: str | None,
    max_overdue: int | None,
    max_sweep_age: timedelta | None,
    timeout: timedelta | None,
) -> None:
    if component == "deployment" and live:
        raise click.UsageError("--live requires a component: worker, run or beat")
    if component in ("deployment", "beat") and name is not None:
        raise click.UsageError("--name requires a component: worker or run")
    if live and (max_overdue is not None or max_sweep_age is not None):
        raise click.UsageError("--max-overdue and --max-sweep-age cannot be combined with --live")
    if component == "beat" and max_sweep_age is not None:
        raise click.UsageError("--max-sweep-age requires another component: beat does not sweep")
    runtime = runtime_of(cli.delays)
    settings = runtime.settings
    question = HealthQuestion(
        component,
        socket.gethostname(),
        name,
        max_overdue,
        None if max_sweep_age is None else max_sweep_age.total_seconds(),
        5.0 if timeout is None else timeout.total_seconds(),
    )
    checks = HealthChecks(runtime.store, settings, partial(ask_broker, runtime))
    found = [
        check._replace(detail=cli.hints.rewrite(check.detail))
        for check in (checks.live(question) if live else checks.ready(question))
    ]
    is_healthy = all(check.is_ok for check in found)
    if cli.is_json:
        print_json(
            {
                "component": component,
                "probe": "live" if live else "ready",
                "is_healthy": is_healthy,
                "checks": [check._asdict() for check in found],
            }
        )
    else:
        results = {True: ("ok", GOOD), False: ("failed", BAD)}
        rows = [(check.name, results[check.is_ok], check.detail) for check in found]
        print_table(("check", "result", "facts"), rows, folded="facts")
    if not is_healthy:
        sys.exit(1)


# -- `--ahead` ------------------------------------------------------------------------------------


def _print_ahead(cli: Cli, days: float, processes: int | None) -> None:
    from delaytasks.operate.forecast import busiest, headline

    cli.import_processors()
    found = cli.delays.forecast(days, processes=processes)
    if cli.is_json:
        print_json(found.as_json())
        return
    about = "about " if found.is_estimate else ""
    verb = "becomes" if found.due == 1 else "become"
    say(f"{about}{count(found.due, 'task')} {verb} due until {show_instant(found.until)}")
    say(one_line(headline(found, lambda at: f"{at:%a} {show_instant(at)}"), LONGEST))
    if hours := busiest(found, HOURS_SHOWN):
        say("")
        print_table(
            ("from", "due", "largest tag", "processes", "busy", "of the hour"),
            [
                [
                    f"{hour.start:%a} {show_instant(hour.start)}",
                    f"{about}{hour.due:,}",
                    next(iter(hour.due_by_tag)),
                    hour.processes,
                    show_duration(hour.busy_s),
                    (f"{hour.utilization:.0%}", BAD if hour.utilization > 1 else GOOD),
                ]
                for hour in hours
            ],
            right=("due", "of the hour"),
            folded="largest tag",
        )
        if len(hours) < len(found.hours):
            say(f"and {count(len(found.hours) - len(hours), 'hour')} more; --json has them")
    for note in found.notes:
        cli.note(one_line(note, LONGEST))


# -- Text -----------------------------------------------------------------------------------------


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
    for kind in ("queue", "tag"):
        _print_groups(kind, found["live"][f"{kind}s"])
    if found["live"]["is_capped"]:
        say("there are more tasks than these counts: they are minima", fg="yellow")
    print_fields(_fields(found, hints))
    say("")
    if late := found["late"]:
        print_table(
            ["queue", "tag", "late tasks", "by", "why"],
            [
                [e["queue"], e["tag"], e["tasks"], show_duration(e["late_s"]), e["why"]]
                for e in late
            ],
            folded="queue tag why",
        )
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
        how = "delaytasks run --forever" if is_direct else "celery -A … worker"
        say(hints.rewrite(f"no workers; start one with: {how}"), fg="yellow")


def _print_groups(kind: str, groups: list[dict[str, Any]]) -> None:
    """Print what the queues or the tags do now."""
    if not groups:
        return
    print_table(
        f"{kind} running overdue by soon held done failed p50 p99 workers".split(),
        [_group_row(group) for group in groups[:GROUPS_SHOWN]],
        right=("by", "p50", "p99"),
        folded=kind,
        extra="p50 held workers failed soon by p99",
    )
    if (more := len(groups) - GROUPS_SHOWN) > 0:
        say(f"and {more:,} more")
    say("")


def _group_row(group: dict[str, Any]) -> list[Cell]:
    def lateness(late_s: float | None) -> Cell:
        if late_s is None:
            return NOTHING
        return (show_measured(late_s), BAD if late_s >= MARKED_LATE_S else GOOD)

    name, overdue = cell(group["name"]), group["overdue"]
    return [
        (f"{name} paused", "yellow") if group["is_paused"] else name,
        group["running"],
        overdue,
        (show_duration(group["oldest_overdue_s"]), BAD) if overdue else NOTHING,
        group["soon"],
        group["held"],
        group["ended"] - group["failed"],
        group["failed"],
        lateness(group["lateness_p50_s"]),
        lateness(group["lateness_p99_s"]),
        group["workers"],
    ]


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


def _database_cell(database: dict[str, Any], hints: Hints) -> Cell:
    url = database["url"]
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
        offset = show_offset(worker["clock_offset_s"])
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


def print_on_time(shares: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each tag."""
    rows: list[list[Cell]] = []
    for one in shares:
        promised = "" if one["promised_s"] is None else show_duration(one["promised_s"])
        windows = [_share(one[name], one["target"]) for name in WINDOWS]
        rows.append([one["tag"], promised, *windows])
    ranges = [f"last {name}" for name in WINDOWS]
    print_table(["on time", "within", *ranges], rows, folded="on time")


def _share(numbers: dict[str, Any] | None, target: float) -> Cell:
    if numbers is None:
        return "–"
    text = f"{numbers['share']:.2%} ({numbers['late']:,} late)"
    return _alarm(text, numbers["share"] < target)
