"""`delaytasks status`: the state of a deployment, live, as an exit code, or in the days ahead."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import click

from delaytasks.cli.context import Cli, Command, check_belongs, pass_cli
from delaytasks.cli.options import DURATION
from delaytasks.cli.output import (
    BAD,
    GOOD,
    LONGEST,
    NOTED,
    NOTHING,
    Cell,
    Part,
    Table,
    cell,
    coloured,
    fields,
    plain,
    text_of,
)
from delaytasks.cli.setup import broker_url
from delaytasks.client import DelayTasks
from delaytasks.db import migrations
from delaytasks.model.inputs import ALL_QUEUES, show_duration
from delaytasks.model.moves import Status
from delaytasks.model.text import count, mask_url, one_line
from delaytasks.operate.health import HealthChecks, verdict_of
from delaytasks.operate.state import DeploymentState, ask_broker, read_state, snapshot
from delaytasks.operate.texts import show_instant, show_measured, show_offset
from delaytasks.runtime import runtime_of

#: Seconds between two reads of `--watch`.
EVERY_S = 2.0
#: Queues, and tags, in a table of text. The document has all of them.
GROUPS_SHOWN = 20
#: Hours in the table of `--ahead`: those that keep the processes busiest. The document has all.
HOURS_SHOWN = 12
#: A lateness from which a number is marked.
MARKED_LATE_S = 1.0
_LEVELS = {"good": GOOD, "note": "", "warning": NOTED, "bad": BAD}
_EXIT_CODES = "Exit codes: 0 answered, or healthy; 1 no answer, or not healthy; 2 wrong usage."
#: The options of each kind of answer, by the option that asks for it.
_BELONG_TO = {"--probe": "live name max_overdue", "--ahead": "processes"}


@click.command(cls=Command, epilog=_EXIT_CODES)
@click.option("--watch", is_flag=True, help="Renew the view on a terminal until Ctrl-C.")
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
@click.option("--ahead", type=DURATION, help="Show what becomes due within this time, as 7d.")
@click.option("--processes", type=int, help="--ahead: instead of those of the live workers.")
@pass_cli
def status(
    cli: Cli,
    watch: bool,
    probe: str | None,
    ahead: timedelta | None,
    processes: int | None,
    **limits: Any,
) -> None:
    """Show whether tasks run on time: counts, queues, tags, late tasks, workers and sweeps.

    \b
    delaytasks status --watch
    delaytasks status --probe --max-overdue 1000
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
    if sum(map(bool, asked.values())) > 1:
        raise click.UsageError("--watch, --probe and --ahead exclude each other")
    check_belongs(_BELONG_TO, asked, {"processes": processes, **limits})
    if probe is not None:
        _probe(cli, probe, **limits)
    elif ahead is not None:
        _look_ahead(cli, ahead / timedelta(days=1), processes)
    elif watch and not cli.is_json and sys.stdout.isatty():
        _watch(cli)
    else:
        found = gather(cli)
        cli.answer(found, *_parts(cli, found))


def _watch(cli: Cli) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                lines = text_of(_parts(cli, gather(cli))).splitlines()
                more = len(lines) - console.height
                if more > 0:
                    lines = [*lines[: console.height - 1], f"and {count(more + 1, 'line')} more"]
                live.update(Text.from_ansi("\n".join(lines), no_wrap=True), refresh=True)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        pass  # the way to end this command


# -- The document ---------------------------------------------------------------------------------


def read_deployment(delays: DelayTasks) -> DeploymentState:
    """Read the tables, and ask the broker whether it answers.

    Raises
    ------
    StoreError
        If the database does not answer.
    """
    runtime = runtime_of(delays)
    state = read_state(runtime)
    if state.error is not None:
        raise state.error
    return replace(state, broker_error=ask_broker(runtime))


def gather(cli: Cli) -> dict[str, Any]:
    """Return the document that `status --json` prints, and of which the text is made."""
    delays, runtime = cli.delays, cli.runtime
    state = read_deployment(delays)
    live, settings = snapshot(cli.store, delays.settings, state), delays.settings
    live_total = live.total.as_json()
    del live_total["name"]
    document = {
        "now": state.now,
        "verdict": verdict_of(state).as_json(),
        "counts": {status.name: count.rows for status, count in state.counts.items()},
        "estimated": [status.name for status, count in state.counts.items() if count.is_estimate],
        "live": {
            **live_total,
            "queues": [group.as_json() for group in live.queues],
            "tags": [group.as_json() for group in live.tags],
            "is_capped": live.is_capped,
        },
        "late": [
            {**each._asdict(), "reason": each.reason.code, "why": cli.rewrite(each.reason.text)}
            for each in state.late
        ],
        "overdue": {
            "count": state.overdue,
            "oldest": state.oldest,
            "late_s": state.oldest_overdue_s,
        },
        "expired_leases": state.expired_leases,
        "workers": [
            {**each._asdict(), "up_s": each.up_s, "running": live.running_of.get(each.name, 0)}
            for each in state.workers
        ],
        "lost_workers": state.lost,
        "sweeps": state.sweeps,
        "broker": {
            "url": broker_url(runtime.celery),
            # Without a broker, nothing was asked.
            "is_up": state.broker_error is None if settings.uses_broker else None,
            "error": state.broker_error,
        },
        "timer": {"name": settings.timer_kind, **_timer(cli, state)},
        "database": {
            "url": cli.store.database.shown_url,
            "server": state.server,
            "revision": migrations.current(*cli.tables),
            "head": migrations.head(),
        },
    }
    return cast(dict[str, Any], plain(document))


def _timer(cli: Cli, state: DeploymentState) -> dict[str, Any]:
    """Return the state of the timer. For `redis`, count the near tasks of each queue."""
    timer = cli.runtime.redis_timer
    if timer is None:
        return {"is_up": state.broker_error is None, "queues": {}}
    served = {queue for worker in state.workers for queue in worker.queues} - {ALL_QUEUES}
    counts = timer.counts(sorted({cli.delays.settings.default_queue, *served}))
    near = {name: sum(of_queue) for name, of_queue in (counts or {}).items()}
    return {"url": mask_url(timer.link.url), "is_up": counts is not None, "queues": near}


# -- The text of the document ---------------------------------------------------------------------


def _parts(cli: Cli, found: dict[str, Any]) -> list[Part]:
    """Return the text, with an empty line between its sections."""
    live, verdict = found["live"], found["verdict"]
    counts = [
        [coloured(Status[name]), number, "estimated" if name in found["estimated"] else NOTHING]
        for name, number in found["counts"].items()
    ]
    problems = [
        (f"- {cell(each['text'], 1000)}", _LEVELS[each["level"]]) for each in verdict["problems"]
    ]
    late = [
        [each["queue"], each["tag"], each["tasks"], show_duration(each["late_s"]), each["why"]]
        for each in found["late"]
    ]
    minima = "there are more tasks than these counts: they are minima"
    sections: list[list[Part]] = [
        [Table("status,tasks,count", counts)],
        [(verdict["headline"], _LEVELS[verdict["level"]]), *problems],
        _groups("queue", live["queues"]),
        _groups("tag", live["tags"]),
        [(minima, NOTED)] if live["is_capped"] else [],
        [fields([*_services(cli, found)])],
        [Table("queue,tag,late tasks,by,why", late, folded="queue,tag,why")] if late else [],
        _workers(cli, found),
    ]
    parts = [part for section in sections if section for part in ("", *section)]
    return parts[1:]


def _groups(kind: str, groups: list[dict[str, Any]]) -> list[Part]:
    """Return a table of what the queues or the tags do now."""
    if not groups:
        return []
    columns = f"{kind},running,overdue,by,soon,held,done,failed,p50,p99,workers"
    rows = [_group_row(group) for group in groups[:GROUPS_SHOWN]]
    extra = "p50,held,workers,failed,soon,by,p99"
    more = len(groups) - GROUPS_SHOWN
    return [
        Table(columns, rows, folded=kind, extra=extra),
        *([f"and {more:,} more"] if more > 0 else []),
    ]


def _group_row(group: dict[str, Any]) -> list[Cell]:
    def lateness(late_s: float | None) -> Cell:
        if late_s is None:
            return NOTHING
        return (show_measured(late_s), BAD if late_s >= MARKED_LATE_S else GOOD)

    name, overdue = cell(group["name"]), group["overdue"]
    return [
        (f"{name} paused", NOTED) if group["is_paused"] else name,
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


def _services(cli: Cli, found: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yield the lines between the tables."""
    overdue, expired, database = found["overdue"], found["expired_leases"], found["database"]
    broker, timer = found["broker"], found["timer"]
    late = f"{overdue['count']:,}"
    if overdue["count"]:
        late += f", the oldest since {overdue['oldest']}, {show_duration(overdue['late_s'])} ago"
    yield "overdue", _alarm(late, overdue["count"])
    yield "lease over", _alarm(f"{expired:,}", expired)
    for sweep in found["sweeps"]:
        armed = f", armed until {sweep['armed_until']}" if sweep["armed_until"] else ""
        yield (
            f"sweep {sweep['partition']}",
            _alarm(f"{_ago(sweep['age_s'])}{armed}", sweep["is_late"]),
        )
    tables = f"{database['url']} ({database['server']}), revision {database['revision']}"
    if database["revision"] != database["head"]:
        tables += f", this version has {database['head']}; run: {cli.command} db upgrade"
    yield "database", tables
    states = {True: "up", False: f"down ({cell(broker['error'])})", None: "not used"}
    yield "broker", _alarm(f"{broker['url']}: {states[broker['is_up']]}", broker["error"])
    near = "".join(f"; near tasks of {name}: {n:,}" for name, n in timer["queues"].items())
    state = "up" if timer["is_up"] else "down"
    yield "timer", _alarm(f"{timer['name']}: {state}{near}", not timer["is_up"])
    yield "now", found["now"]


def _alarm(text: str, is_bad: object) -> Cell:
    return (text, BAD if is_bad else "")


def _workers(cli: Cli, found: dict[str, Any]) -> list[Part]:
    rows = [
        [
            each["name"],
            (_ago(each["age_s"]), GOOD if each["is_alive"] else BAD),
            show_duration(each["up_s"]),
            each["pool"],
            f"{NOTHING if each['busy'] is None else each['busy']}/{each['concurrency']}",
            ", ".join(each["queues"]),
            show_offset(each["clock_offset_s"]),
            each["version"],
        ]
        for each in found["workers"]
    ]
    columns = "worker,seen,up for,pool,busy,queues,clock offset,version"
    parts: list[Part] = [Table(columns, rows, folded="worker,queues")] if rows else []
    lost = [
        [each["name"], each["lost_at"], ", ".join(each["queues"])] for each in found["lost_workers"]
    ]
    if lost:
        parts.append(Table("lost worker,at,queues", lost, folded="lost worker,queues"))
    if not rows:
        is_direct = found["timer"]["name"] == "direct"
        how = "delaytasks run --forever" if is_direct else "celery -A … worker"
        parts.append((cli.rewrite(f"no workers; start one with: {how}"), NOTED))
    return parts


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{show_duration(seconds)} ago"


# -- `--probe` and `--ahead` ----------------------------------------------------------------------


def _probe(cli: Cli, component: str, live: bool, name: str | None, max_overdue: int | None) -> None:
    if component == "deployment" and live:
        raise click.UsageError("--live requires a component: worker, run or beat")
    if component in ("deployment", "beat") and name is not None:
        raise click.UsageError("--name requires a component: worker or run")
    if live and max_overdue is not None:
        raise click.UsageError("--max-overdue cannot be combined with --live")
    checks = HealthChecks(cli.runtime, component, socket.gethostname(), name, max_overdue)
    found = [
        check._replace(detail=cli.rewrite(check.detail))
        for check in (checks.live() if live else checks.ready())
    ]
    is_healthy = all(check.is_ok for check in found)
    document = {
        "component": component,
        "probe": "live" if live else "ready",
        "is_healthy": is_healthy,
        "checks": [check._asdict() for check in found],
    }
    results = {True: ("ok", GOOD), False: ("failed", BAD)}
    rows = [(check.name, results[check.is_ok], check.detail) for check in found]
    cli.answer(document, Table("check,result,facts", rows, folded="facts"))
    if not is_healthy:
        sys.exit(1)


def _look_ahead(cli: Cli, days: float, processes: int | None) -> None:
    from delaytasks.operate.forecast import busiest, headline

    cli.import_processors()
    found = cli.delays.forecast(days, processes=processes)
    about = "about " if found.is_estimate else ""
    verb = "becomes" if found.due == 1 else "become"
    parts: list[Part] = [
        f"{about}{count(found.due, 'task')} {verb} due until {show_instant(found.until)}",
        one_line(headline(found, lambda at: f"{at:%a} {show_instant(at)}"), LONGEST),
    ]
    hours = busiest(found, HOURS_SHOWN)
    if hours:
        rows = [
            [
                f"{hour.start:%a} {show_instant(hour.start)}",
                hour.due,
                next(iter(hour.due_by_tag)),
                hour.processes,
                show_duration(hour.busy_s),
                (f"{hour.utilization:.0%}", BAD if hour.utilization > 1 else GOOD),
            ]
            for hour in hours
        ]
        columns = "from,due,largest tag,processes,busy,of the hour"
        parts += ["", Table(columns, rows, folded="largest tag")]
    if len(hours) < len(found.hours):
        parts.append(f"and {count(len(found.hours) - len(hours), 'hour')} more; --json has them")
    cli.answer(found.as_json(), *parts)
    for note in found.notes:
        cli.note(one_line(note, LONGEST))
