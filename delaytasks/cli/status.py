"""`delaytasks db upgrade`, `check` and `status`: the tables, the settings, and whether tasks run.

`status` shows the state of a deployment, live, as an exit code, or in the days ahead.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from operator import itemgetter
from typing import Any, cast

import click

from delaytasks.cli.context import Cli, Command, Group, check_belongs, pass_cli
from delaytasks.cli.options import Typed
from delaytasks.cli.output import (
    BAD,
    GOOD,
    LONGEST,
    NOTED,
    Cell,
    Made,
    Part,
    Table,
    cell,
    coloured,
    fields,
    plain,
    text_of,
)
from delaytasks.client import DelayTasks
from delaytasks.db import migrations
from delaytasks.model.inputs import show_duration
from delaytasks.model.text import count, mask_url, one_line
from delaytasks.operate.checks import check_settings
from delaytasks.operate.health import HealthChecks, verdict_of
from delaytasks.operate.operations import DURATION
from delaytasks.operate.state import DeploymentState, ask_broker, live_groups, server_problem
from delaytasks.operate.statistics import RunTotals
from delaytasks.operate.texts import show_instant, show_offset
from delaytasks.runtime import runtime_of

# -- `db upgrade` ---------------------------------------------------------------------------------


@click.group(cls=Group)
def db() -> None:
    """Make and change the tables.

    \b
    delaytasks db upgrade
    """


@db.command()
@click.option(
    "--to", metavar="REVISION", default="head", help="Another revision; base is before the first."
)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if the tables need this.")
@click.option("--yes", is_flag=True, help="Go back without a question.")
@pass_cli
def upgrade(cli: Cli, to: str, check: bool, yes: bool) -> None:
    """Make the tables, or bring them to this version.

    \b
    delaytasks db upgrade
    delaytasks db upgrade --check
    delaytasks db upgrade --to base --yes

    Rows stay, unless --to goes back to a revision whose tables have no place for them.
    """
    if check:
        sys.exit(0 if _answer_current(cli) else 1)
    database_url, current = cli.store.database.shown_url, migrations.current(*cli.tables)
    is_back = to == "base" or to.startswith("-") or (current is not None and to < current)
    if is_back:
        question = f"Bring {database_url} back to {to}? Tables may be dropped"
        cli.confirm(yes, question, "Going back may drop columns and tables; use --yes.")
        migrations.downgrade(*cli.tables, to)
    else:
        migrations.upgrade(*cli.tables, to)
    _answer_current(cli, f"{'downgraded' if is_back else 'upgraded'} {database_url}")


def _answer_current(cli: Cli, *done: str) -> bool:
    """Print the revision; return whether it is this version's."""
    head, revision = migrations.head(), migrations.current(*cli.tables)
    document = {"database": cli.store.database.shown_url, "revision": revision, "head": head}
    is_current = revision == head
    cli.answer({**document, "is_current": is_current}, *done, _revision(cli, revision, head))
    return is_current


def _revision(cli: Cli, revision: str | None, head: str) -> str:
    state = f"this version has {head}; run: {cli.command} db upgrade"
    return f"revision {revision or 'none yet'}, {'as this version' if revision == head else state}"


# -- `check`: would the waiting tasks run with this code, and the effective settings --------------


@click.command(cls=Command)
@click.option("--settings", is_flag=True, help="Print the settings and the origin of each instead.")
@pass_cli
def check(cli: Cli, settings: bool) -> None:
    """Check before a deployment that the waiting tasks would run with this code.

    \b
    delaytasks check
    delaytasks check --settings

    Lists the tasks whose tag has no processor, and those whose body the processor's schema refuses.
    The exit code is 1 if there are any, and 2 if a setting is wrong. A database that cannot be
    written, or can lose tasks, is only a warning.

    Passwords are masked. Celery's configuration is overridden by the environment, and both by the
    arguments of DelayTasks(...).
    """
    if settings:
        _answer_settings(cli)
        return
    cli.import_processors()
    check_settings(cli.runtime)
    found, warning = cli.delays.check(), server_problem(cli.store.database)
    tasks = count(sum(finding.tasks for finding in found), "task")
    verdict = f"{tasks} would not run well with this code"
    columns = "tag,queue=queues,tasks,first due=first_due,problem,for example=ids"
    cli.answer(
        {"findings": [finding.as_json() for finding in found], "warning": warning},
        Table.of(columns, found, folded="tag,queue,problem"),
        verdict if found else "every waiting task has a processor that accepts its body",
        *([(f"warning: {cli.store.database.shown_url}: {warning}", NOTED)] if warning else []),
    )
    if found:
        sys.exit(1)


def _answer_settings(cli: Cli) -> None:
    names = ("name", "value", "origin", "about")
    rows = [dict(zip(names, row, strict=True)) for row in cli.delays.settings.effective()]
    columns = "setting=name,value,origin,meaning=about"
    table = Table.of(columns, rows, folded="value,meaning", extra="meaning")
    cli.answer({"settings": rows}, table)


def broker_url(app: Any) -> str:
    """Return the broker's URL, or several, without passwords."""
    # Celery's default URL is not in its configuration.
    url = app.conf.broker_write_url or app.connection_for_write().as_uri()
    return ";".join(mask_url(part) for part in re.split(r";(?=[a-z0-9+.-]+://)", str(url)))


# -- `status` -------------------------------------------------------------------------------------


#: Seconds between two reads of `--watch`.
EVERY_S = 2.0
#: Queues, and tags, in a table of text. The document has all of them.
GROUPS_SHOWN = 20
#: The busiest hours, which the table of `--ahead` shows. The document has all hours.
HOURS_SHOWN = 12
_LEVELS = {"good": GOOD, "note": "", "warning": NOTED, "bad": BAD}


@click.command(cls=Command)
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
@click.option(
    "--ahead", type=Typed(DURATION), help="Show what becomes due within this time, as 7d."
)
@pass_cli
def status(
    cli: Cli, watch: bool, probe: str | None, ahead: timedelta | None, **limits: Any
) -> None:
    """Show whether tasks run on time: counts, queues, tags, late tasks, workers and sweeps.

    \b
    delaytasks status --watch
    delaytasks status --probe
    delaytasks status --probe worker --live
    delaytasks status --ahead 7d

    Each queue and tag has the number of its tasks that run and that are overdue (of the 20 largest
    groups), and each tag its runs of the last 15 minutes, of which the last one may be missing,
    with their lateness (p50, p99). In a table of more than a million tasks, the large counts of
    statuses are estimates.

    With --probe, the exit code is 1 unless the component is healthy. The deployment is healthy if
    database and broker answer, the tables have this version, a worker lives, a sweep was recent,
    and each queue with late tasks has a worker. A worker (or `run --forever`) of this host is ready
    under the same conditions except the last, if it has reported itself. With --live it is
    unhealthy only if it has stopped reporting while a database answers: a restart does not help
    against an outage. Beat is healthy if its messages have reached a worker recently. The HTTP API
    and the console have URLs for probes instead.

    --ahead shows what becomes due in each hour, and whether the processes of the live workers
    suffice.
    """
    asked = {"--watch": watch, "--probe": probe, "--ahead": ahead}
    if sum(map(bool, asked.values())) > 1:
        raise click.UsageError("--watch, --probe and --ahead exclude each other")
    check_belongs({"--probe": "live name"}, asked, limits)
    if probe is not None:
        _probe(cli, probe, **limits)
    elif ahead is not None:
        _look_ahead(cli, ahead / timedelta(days=1))
    elif watch and not cli.is_json and sys.stdout.isatty():
        _watch(cli)
    else:
        found = gather(cli)
        cli.answer(found, "" if cli.is_json else _text(cli, found))


def _watch(cli: Cli) -> None:
    from rich.live import Live
    from rich.text import Text

    # Ctrl-C is the way to end this command.
    with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text.from_ansi(_text(cli, gather(cli)), no_wrap=True), refresh=True)
            time.sleep(EVERY_S)


# -- The document ---------------------------------------------------------------------------------


def read_deployment(delays: DelayTasks) -> DeploymentState:
    """Read the tables, and ask the broker whether it answers.

    Raises
    ------
    StoreError
        If the database does not answer.
    """
    found = DeploymentState(runtime_of(delays))
    found.add_failures()
    found.broker_error = ask_broker(found.runtime)
    return found


def gather(cli: Cli) -> dict[str, Any]:
    """Return the document that `status --json` prints, and of which the text is made."""
    delays, runtime = cli.delays, cli.runtime
    state = read_deployment(delays)
    live, settings = live_groups(state), delays.settings
    document = {
        "now": state.now,
        "verdict": verdict_of(state).as_json(),
        "counts": state.rows,
        "live": {
            "queues": [asdict(group) for group in live["queue"]],
            "tags": [{**asdict(group), **_runs(state, group.name)} for group in live["tag"]],
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
        "workers": [{**each._asdict(), "up_s": each.up_s} for each in state.workers],
        "lost_workers": state.lost,
        "sweeps": state.sweeps,
        "broker": {
            "url": broker_url(runtime.celery),
            # Without a broker, nothing was asked.
            "is_up": state.broker_error is None if settings.uses_broker else None,
            "error": state.broker_error,
        },
        "timer": {"name": settings.timer_kind, "is_up": _is_timer_up(cli, state)},
        "database": {
            "url": cli.store.database.shown_url,
            "server": state.server,
            "revision": migrations.current(*cli.tables),
            "head": migrations.head(),
        },
    }
    return cast(dict[str, Any], plain(document))


def _runs(state: DeploymentState, tag: str) -> dict[str, Any]:
    """Return the runs of a tag in the last minutes."""
    total = state.runs.get(tag, RunTotals())
    shares = {f"lateness_p{share}_s": total.lateness_quantile(share / 100) for share in (50, 99)}
    return {"runs": total.started, "failed": total.failed, **shares}


def _is_timer_up(cli: Cli, state: DeploymentState) -> bool:
    timer = cli.runtime.redis_timer
    return state.broker_error is None if timer is None else timer.is_reachable()


# -- The text of the document ---------------------------------------------------------------------


def _text(cli: Cli, found: dict[str, Any]) -> str:
    """Return the text, with an empty line between its sections."""
    live, verdict = found["live"], found["verdict"]
    counts = [[coloured(name), number] for name, number in found["counts"].items()]
    problems = [
        (f"- {cell(each['text'], 1000)}", _LEVELS[each["level"]]) for each in verdict["problems"]
    ]
    sweeps = "sweep=partition,age=age_s,late=is_late,armed until=armed_until"
    sections: list[list[Part]] = [
        [(verdict["headline"], _LEVELS[verdict["level"]]), *problems],
        [Table("status,tasks", counts)],
        _groups("queue", "", live["queues"]),
        _groups("tag", "runs,failed,p50=lateness_p50_s,p99=lateness_p99_s,", live["tags"]),
        [fields([*_services(cli, found)])],
        [Table.of(sweeps, found["sweeps"])],
        [_workers(cli, found)],
    ]
    return "\n\n".join(filter(None, map(text_of, sections)))


def _groups(kind: str, runs: str, groups: list[dict[str, Any]]) -> list[Part]:
    """Return a table of the present tasks of the queues or the tags. `runs` are more columns."""
    columns = f"{kind}=name,paused=is_paused,running,overdue,by=oldest_overdue_s,{runs}workers"
    extra = "p50,workers,failed,by,p99" if runs else "workers,by"
    more = [f"and {len(groups) - GROUPS_SHOWN:,} more"] if len(groups) > GROUPS_SHOWN else []
    return [Table.of(columns, groups[:GROUPS_SHOWN], folded=kind, extra=extra), *more]


def _services(cli: Cli, found: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yield the lines between the tables."""
    overdue, database, broker, timer = itemgetter("overdue", "database", "broker", "timer")(found)
    late = f"{overdue['count']:,}"
    if overdue["count"]:
        late += f", the oldest since {overdue['oldest']}, {show_duration(overdue['late_s'])} ago"
    yield "overdue", late
    yield "lease over", found["expired_leases"]
    revision = _revision(cli, database["revision"], database["head"])
    yield "database", f"{database['url']} ({database['server']}), {revision}"
    states = {True: "up", False: f"down ({cell(broker['error'])})", None: "not used"}
    yield "broker", f"{broker['url']}: {states[broker['is_up']]}"
    yield "timer", f"{timer['name']}: {'up' if timer['is_up'] else 'down'}"
    yield "now", found["now"]


def _workers(cli: Cli, found: dict[str, Any]) -> Part:
    if found["workers"]:
        made: Made = {"clock offset": lambda each: show_offset(each["clock_offset_s"])}
        columns = (
            "worker=name,alive=is_alive,seen ago=age_s,up for=up_s,pool,busy,of=concurrency,queues,"
            "clock offset,version"
        )
        looks = {"folded": "worker,queues", "extra": "pool,version,up for,clock offset"}
        return Table.of(columns, found["workers"], made, **looks)
    return cli.rewrite("no workers; start one with: celery -A … worker"), NOTED


# -- `--probe` and `--ahead` ----------------------------------------------------------------------


def _probe(cli: Cli, component: str, live: bool, name: str | None) -> None:
    if (component == "deployment" and live) or (component not in ("worker", "run") and name):
        raise click.UsageError("--live requires a component, and --name requires worker or run")
    checks = HealthChecks(cli.runtime, component, socket.gethostname(), name)
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
    made: Made = {"result": lambda check: ("ok", GOOD) if check.is_ok else ("failed", BAD)}
    cli.answer(document, Table.of("check=name,result,facts=detail", found, made, folded="facts"))
    if not is_healthy:
        sys.exit(1)


def _look_ahead(cli: Cli, days: float) -> None:
    from delaytasks.operate.forecast import busiest, headline

    cli.import_processors()
    found = cli.delays.forecast(days)
    least = "at least " if found.is_cut else ""
    verb = "becomes" if found.due == 1 else "become"
    parts: list[Part] = [
        f"{least}{count(found.due, 'task')} {verb} due until {show_instant(found.until)}",
        one_line(headline(found, lambda at: f"{at:%a} {show_instant(at)}"), LONGEST),
    ]
    hours = busiest(found, HOURS_SHOWN)
    if hours:
        made: Made = {
            "from": lambda hour: f"{hour.start:%a} {show_instant(hour.start)}",
            "largest tag": lambda hour: next(iter(hour.due_by_tag)),
            "of the hour": lambda hour: (
                (f"{hour.utilization:.0%}", BAD if hour.utilization > 1 else GOOD)
            ),
        }
        columns = "from,due,largest tag,processes,busy=busy_s,of the hour"
        parts += ["", Table.of(columns, hours, made, folded="largest tag")]
    if len(hours) < len(found.hours):
        parts.append(f"and {count(len(found.hours) - len(hours), 'hour')} more; --json has them")
    cli.answer(found.as_json(), *parts)
    for note in found.notes:
        cli.note(one_line(note, LONGEST))
