"""`forecast`: what becomes due in the next days, and how late it starts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import BAD, GOOD, Cell, count, print_json, print_table, say
from delaytasks.cli.times import DURATION, show_instant
from delaytasks.core.durations import show_duration
from delaytasks.forecast.result import Forecast, ForecastStep
from delaytasks.forecast.sentences import (
    ON_TIME_S,
    most_important,
    pool_sentence,
    worst_sentence,
)

#: Steps in the table without --all: those that are latest, or have the most tasks.
MAX_STEPS_SHOWN = 12


@click.command(cls=Command)
@click.option("--days", type=float, default=7, show_default=True, help="From now on.")
@click.option("--tag", help="Only the numbers of this tag.")
@click.option("--workers", type=int, help="The number of workers, instead of those alive.")
@click.option("--processes", type=int, help="The processes of each worker.")
@click.option(
    "--rate",
    type=float,
    help="Tasks that a process runs in a second, for tags that were not measured.",
)
@click.option(
    "--target",
    type=DURATION,
    default="1m",
    show_default=True,
    help="The lateness for which workers are counted.",
)
@click.option(
    "--step", type=DURATION, default="1h", show_default=True, help="One row of the table."
)
@click.option("--all", "shows_all", is_flag=True, help="Print all steps.")
@pass_cli
def forecast(
    cli: Cli,
    days: float,
    tag: str | None,
    workers: int | None,
    processes: int | None,
    rate: float | None,
    target: timedelta,
    step: timedelta,
    shows_all: bool,
) -> None:
    """Show what becomes due, how late it starts, and how many workers it needs.

    \b
    delaytasks forecast
    delaytasks forecast --days 2 --tag mail.send --workers 4
    """
    cli.import_processors()
    found = cli.delays.forecast(
        days,
        tag=tag,
        workers=workers,
        processes=processes,
        rate=rate,
        target=target,
        step=step,
    )
    if cli.is_json:
        print_json(found.as_json())
        return
    _print(found, shows_all)
    for note in found.notes:
        cli.note(note)


def _print(found: Forecast, shows_all: bool) -> None:
    about = "about " if found.is_estimate else ""
    paused = f", {found.paused:,} of them paused" if found.paused else ""
    verb = "becomes" if found.due == 1 else "become"
    say(f"{about}{count(found.due, 'task')} {verb} due until {show_instant(found.until)}{paused}")
    if sentence := worst_sentence(found, lambda at: f"{at:%a} {show_instant(at)}"):
        say(f"from {sentence}")
    steps = found.steps if shows_all else most_important(found.steps, MAX_STEPS_SHOWN)
    if steps:
        say("")
        _print_steps(steps, about)
        if len(steps) < len(found.steps):
            say(f"and {count(len(found.steps) - len(steps), 'step')} more; --all prints them")
    for pool in found.pools:
        say("")
        say(pool_sentence(pool, found.target_s))


def _print_steps(steps: Sequence[ForecastStep], about: str) -> None:
    print_table(
        ("from", "due", "largest tag", "late", "with twice the workers", "waiting afterwards"),
        [
            [
                f"{step.start:%a} {show_instant(step.start)}",
                f"{about}{step.due:,}",
                next(iter(step.due_by_tag), None),
                _late(step.late_s),
                _late(step.late_s_doubled),
                step.backlog,
            ]
            for step in steps
        ],
        right=("due",),
        folded="largest tag",
    )


def _late(late_s: float | None) -> Cell:
    if late_s is None:
        return ("never starts", BAD)
    return ("on time", GOOD) if late_s < ON_TIME_S else show_duration(late_s)
