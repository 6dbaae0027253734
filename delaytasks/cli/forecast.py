"""`forecast`: what becomes due in the next days, and whether the processes suffice."""

from __future__ import annotations

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import BAD, GOOD, count, print_json, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.core.inputs import show_duration

#: Hours in the table without --all: those that keep the processes busiest.
MAX_HOURS_SHOWN = 12


@click.command(cls=Command)
@click.option("--days", type=float, default=7, show_default=True, help="From now on.")
@click.option("--processes", type=int, help="Processes, instead of those of the live workers.")
@click.option("--all", "shows_all", is_flag=True, help="Print all hours.")
@pass_cli
def forecast(cli: Cli, days: float, processes: int | None, shows_all: bool) -> None:
    """Show what becomes due in each hour, and whether the processes suffice.

    \b
    delaytasks forecast
    delaytasks forecast --days 2 --processes 32
    """
    from delaytasks.forecast import busiest, headline

    cli.import_processors()
    found = cli.delays.forecast(days, processes=processes)
    if cli.is_json:
        print_json(found.as_json())
        return
    about = "about " if found.is_estimate else ""
    paused = f", {found.paused:,} of them paused" if found.paused else ""
    verb = "becomes" if found.due == 1 else "become"
    say(f"{about}{count(found.due, 'task')} {verb} due until {show_instant(found.until)}{paused}")
    say(headline(found, lambda at: f"{at:%a} {show_instant(at)}"))
    hours = found.hours if shows_all else busiest(found, MAX_HOURS_SHOWN)
    if hours:
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
            say(f"and {count(len(found.hours) - len(hours), 'hour')} more; --all prints them")
    for note in found.notes:
        cli.note(note)
