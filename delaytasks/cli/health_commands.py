"""`delaytasks health` and `delaytasks check`."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import (
    BAD,
    DURATION,
    GOOD,
    cell,
    count,
    print_json,
    print_table,
    say,
)
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.operations.health import HealthChecks, HealthQuestion
from delaytasks.operations.state import explain_overdue
from delaytasks.runtime import runtime_of
from delaytasks.storage.state_queries import Stats
from delaytasks.timers.publisher import broker_error

_EXIT_CODES_OF_HEALTH = "Exit codes: 0 healthy; 1 not healthy; 2 wrong usage or settings."


@click.command(cls=Command, epilog=_EXIT_CODES_OF_HEALTH)
@click.argument(
    "component", type=click.Choice(["deployment", "worker", "drain", "beat"]), default="deployment"
)
@click.option("--live", is_flag=True, help="Fail only if a restart of the process would help.")
@click.option(
    "--name",
    metavar="NAME",
    help="Only the worker of this name, as celery@shop1. [all of this host]",
)
@click.option(
    "--max-overdue", type=click.IntRange(min=0), help="Most overdue tasks. [they are not counted]"
)
@click.option(
    "--max-sweep-age",
    type=DURATION,
    help="Oldest sweep. [three times the interval of delaytasks_sweep]",
)
@click.option(
    "--timeout",
    type=DURATION,
    default="5s",
    show_default=True,
    help="The time that the databases have to answer.",
)
@pass_cli
def health(
    cli: Cli,
    component: str,
    live: bool,
    name: str | None,
    max_overdue: int | None,
    max_sweep_age: timedelta | None,
    timeout: timedelta,
) -> None:
    """Check the deployment, the workers or drains of this host, or beat.

    \b
    delaytasks health
    delaytasks health --max-overdue 1000 --max-sweep-age 1m --json
    delaytasks health worker --live
    delaytasks health drain
    delaytasks health beat

    The deployment is healthy if databases and broker answer, the tables have this version, a worker
    lives, a sweep was recent, and each queue with late tasks has a worker. A worker or drain is
    ready under the same conditions except the last one, if it has reported itself. With --live it
    is unhealthy only if it has stopped reporting while a database answers: a restart does not help
    against an outage. Beat is healthy if its messages have reached a worker recently. The HTTP API
    and the console have URLs for probes instead.
    """
    _check_options(component, live, name, max_overdue, max_sweep_age)
    wiring = runtime_of(cli.delays)
    settings = wiring.settings
    question = HealthQuestion(
        component,
        socket.gethostname(),
        name,
        max_overdue,
        None if max_sweep_age is None else max_sweep_age.total_seconds(),
        timeout.total_seconds(),
    )
    queue = wiring.publisher.queue(settings.default_queue)
    checks = HealthChecks(
        wiring.store,
        settings,
        lambda: broker_error(wiring.celery, queue, settings.publish_limit_s),
    )
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
        print_table(
            ("check", "result", "facts"),
            [(check.name, results[check.is_ok], check.detail) for check in found],
            folded="facts",
        )
    if not is_healthy:
        sys.exit(1)


def _check_options(
    component: str,
    live: bool,
    name: str | None,
    max_overdue: int | None,
    max_sweep_age: timedelta | None,
) -> None:
    if component == "deployment" and live:
        raise click.UsageError("--live requires a component: worker, drain or beat")
    if component in ("deployment", "beat") and name is not None:
        raise click.UsageError("--name requires a component: worker or drain")
    if live and (max_overdue is not None or max_sweep_age is not None):
        raise click.UsageError("--max-overdue and --max-sweep-age cannot be combined with --live")
    if component == "beat" and max_sweep_age is not None:
        raise click.UsageError("--max-sweep-age requires another component: beat does not sweep")


# -- `check`: would the waiting tasks run with this code? -----------------------------------------


_EXIT_CODES_OF_CHECK = (
    "Exit codes: 0 all would run; 1 some would not, or the database is unavailable; "
    "2 wrong usage or settings."
)


@click.command(cls=Command, epilog=_EXIT_CODES_OF_CHECK)
@pass_cli
def check(cli: Cli) -> None:
    """Check before a deployment that the waiting tasks would run with this code.

    Lists the tasks whose tag has no processor, and those whose body the processor's schema refuses.
    A wrong setting ends the command with exit code 2. Warnings (late tasks that no worker takes, a
    database that can lose tasks) do not change the exit code.

    \b
    delaytasks check
    """
    cli.import_processors()
    runtime_of(cli.delays).checks.check_settings()
    found, warnings = (
        list(cli.delays.check()),
        list(map(cli.hints.rewrite, warnings_of(cli.delays))),
    )
    if cli.is_json:
        print_json({"findings": [finding.as_json() for finding in found], "warnings": warnings})
    else:
        if found:
            print_table(
                ["tag", "queue", "tasks", "first due", "problem", "for example"],
                [
                    [f.tag, ", ".join(f.queues), f.tasks, f.first_due, f.problem, _examples(f.ids)]
                    for f in found
                ],
                folded="tag queue problem",
            )
            tasks = count(sum(finding.tasks for finding in found), "task")
            say(f"{tasks} would not run well with this code")
        else:
            say("every waiting task has a processor that accepts its body")
        print_warnings(warnings)
    if found:
        sys.exit(1)


def _examples(ids: list[int]) -> str:
    return " ".join(map(str, ids))


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
