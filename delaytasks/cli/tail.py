"""`tail`: follows the changes of tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import click

from delaytasks.cli.bulk import FILTERS
from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import cell, coloured, say
from delaytasks.cli.times import DURATION, pairs_or
from delaytasks.core.clock import monotonic
from delaytasks.core.filters import filter_of
from delaytasks.core.inputs import show_duration
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import last_line, one_line
from delaytasks.core.why import deferral_of
from delaytasks.operations.following import Follower, FollowStep, changed_at
from delaytasks.runtime import runtime_of

#: Filters of this command. Times are left out, since it shows what happens now.
_TAIL_FILTERS = "tag queue key_prefix status meta".split()
LONGEST_DETAIL = 300
#: The ids of tasks with short tags begin in the same column.
TAG_WIDTH = 16


def _takes_filters(command: Any) -> Any:
    for name in reversed(_TAIL_FILTERS):
        attributes = {**FILTERS[name], "help": f"Only tasks {FILTERS[name]['help']}"}
        command = click.option(f"--{name.replace('_', '-')}", **attributes)(command)
    return command


@click.command(cls=Command)
@_takes_filters
@click.option("--key", help="Only tasks with this key. All changes of them are found.")
@click.option(
    "--lines",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="First show up to N changes of the last minute.",
)
@click.option(
    "--every", type=DURATION, default="500ms", show_default=True, help="The time between two reads."
)
@click.option("--for", "for_", type=DURATION, help="Stop after this time.")
@pass_cli
def tail(cli: Cli, lines: int, every: timedelta, for_: timedelta | None, **filters: Any) -> None:
    """Follow the changes of tasks: scheduled, running, done, failed, cancelled. Ctrl-C ends it.

    Each line shows a task as it is after its change. Of changes within the time between two reads,
    only the last is shown. With --json, each line is one JSON document.

    \b
    delaytasks tail --tag mail.send --status FAILED
    delaytasks tail --meta tenant=acme --json
    """
    given = {name: pairs_or(value) for name, value in filters.items() if value}
    follower = Follower(cli.store, filter_of(given))
    ends_at = None if for_ is None else monotonic() + for_.total_seconds()
    try:
        step = follower.read()
        first = step._replace(tasks=step.tasks[len(step.tasks) - min(lines, len(step.tasks)) :])
        _Printer(cli).print_until(ends_at, first, follower, every.total_seconds())
    except KeyboardInterrupt:
        pass  # the way to end this command


class _Printer:
    def __init__(self, cli: Cli) -> None:
        self._cli = cli
        self._clock = runtime_of(cli.delays).clock
        self._is_incomplete = False

    def print_until(
        self, ends_at: float | None, step: FollowStep, follower: Follower, every_s: float
    ) -> None:
        while True:
            self._print(step)
            left_s = every_s if ends_at is None else ends_at - monotonic()
            if left_s <= 0:
                return
            time.sleep(min(every_s, left_s))
            step = follower.read()

    def _print(self, step: FollowStep) -> None:
        for task in step.tasks:
            if self._cli.is_json:
                click.echo(json.dumps(document_of(task)))
            else:
                say(self._line(task))
        if step.is_incomplete and not self._is_incomplete:
            self._cli.note("There are more changes than tail reads; it shows some of them.")
        self._is_incomplete = step.is_incomplete

    def _line(self, task: DelayTask) -> str:
        status, colour = coloured(task.status)
        at = changed_at(task).strftime("%H:%M:%S.%f")[:-3]
        detail = one_line(detail_of(task, self._clock.now()), LONGEST_DETAIL)
        names = f"{click.style(f'{cell(task.tag):{TAG_WIDTH}}', bold=True)} {task.id}"
        if task.key is not None:
            names += f" {cell(task.key)}"
        shown = click.style(f"{status:12}", fg=colour or None)
        return f"{click.style(at, dim=True)} {shown} {names}  {detail}".rstrip()


def document_of(task: DelayTask) -> dict[str, Any]:
    """Return the JSON document of a change. It has no body and no result."""
    document = task.as_json()
    for name in ("body", "result", "headers"):
        del document[name]
    error = last_line(task.error) or None
    return {
        **document,
        "time": changed_at(task).isoformat(),
        "late_s": _late_s(task),
        "error": error,
    }


def detail_of(task: DelayTask, now: Any) -> str:
    """Return what the status of the task does not say."""
    return ", ".join(_details(task, now))


def _details(task: DelayTask, now: Any) -> Iterator[str]:
    error = last_line(task.error)
    if task.status in (Status.NOT_COMPLETE, Status.HELD):
        wait_s = (task.expected_time - now).total_seconds()
        due = f"in {show_duration(wait_s)}" if wait_s > 0 else "now"
        if deferral_of(task.error):
            yield f"deferred, next try {due}: {error}"
        elif task.attempts and error:
            yield f"retry {task.attempts} {due}: {error}"
        else:
            yield f"due {due}"
        return
    if task.status is Status.RUNNING:
        yield f"attempt {task.attempts}"
        if task.worker:
            yield f"on {task.worker}"
    if (late_s := _late_s(task)) is not None:
        yield f"{show_duration(max(late_s, 0))} late"
    began, ended = task.execution_time, task.update_time
    if task.status in (Status.DONE, Status.FAILED) and began and ended:
        yield f"took {show_duration(max((ended - began).total_seconds(), 0))}"
    if error and task.is_finished:
        yield error


def _late_s(task: DelayTask) -> float | None:
    """Return the lateness of the last run; None before it."""
    has_run = task.status in (Status.RUNNING, Status.DONE, Status.FAILED)
    if task.execution_time is None or not has_run:
        return None
    return round((task.execution_time - task.due).total_seconds(), 3)
