"""`db partitions`: the task table in partitions by time, on PostgreSQL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli, shown_url
from delaytasks.cli.output import NOTHING, cell, count, print_json, print_table, say
from delaytasks.cli.times import show_instant, to_duration
from delaytasks.core.durations import parse_duration

if TYPE_CHECKING:
    from delaytasks.partitions.pruning import Pruned
    from delaytasks.partitions.table import Partitions


@click.group(epilog=EXIT_CODES)
def partitions() -> None:
    """Keep the task table in partitions by time, so that old tasks go as a whole. PostgreSQL only.

    \b
    delaytasks db partitions list
    """


def _to_days(_ctx: click.Context, _option: click.Parameter, typed: str) -> timedelta:
    every = parse_duration(typed)
    if not every or every % timedelta(days=1):
        raise click.UsageError(
            f"--every is a whole number of days, such as 1d or 7d, and not {typed}"
        )
    return every


def _periods(command: Callable[..., None]) -> Callable[..., None]:
    every = click.option(
        "--every",
        callback=_to_days,
        default="7d",
        show_default=True,
        metavar="DAYS",
        help="The time that each covers.",
    )
    ahead = click.option(
        "--ahead",
        type=click.IntRange(1, 100),
        default=4,
        show_default=True,
        help="How many begin after now.",
    )
    return every(ahead(command))


_of_shard = click.option(
    "--shard",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With several databases: that of this number.",
)


@partitions.command("list", epilog=EXIT_CODES)
@_of_shard
@pass_cli
def list_(cli: Cli, shard: int) -> None:
    """Print the partitions: when their tasks were scheduled, how large they are, what waits or runs in them.

    \b
    delaytasks db partitions list
    """
    found = _partitions(cli, shard)
    parts, live = found.all(), found.live()
    if cli.is_json:
        print_json(
            [
                {
                    "name": part.name,
                    "since": _shown(part.since),
                    "until": _shown(part.until),
                    "is_default": part.is_default,
                    "rows": part.rows,
                    "bytes": part.bytes,
                    "live": live.get(part.name, 0),
                }
                for part in parts
            ]
        )
        return
    print_table(
        ("partition", "since", "until", "rows", "MB", "live"),
        (
            (
                part.name,
                cell(_shown(part.since)),
                cell(_shown(part.until)),
                NOTHING if part.rows is None else f"{part.rows:,}",
                f"{part.bytes / 1e6:,.1f}",
                f"{live.get(part.name, 0):,}",
            )
            for part in parts
        ),
        right="rows MB live",
    )


@partitions.command(epilog=EXIT_CODES)
@_of_shard
@_periods
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_cli
def convert(cli: Cli, shard: int, every: timedelta, ahead: int, yes: bool) -> None:
    """Make the task table the first of its partitions. Workers and producers may go on meanwhile.

    Wants to be the tables' owner. There is no command that takes it back.

    \b
    delaytasks db partitions convert --every 7d --yes
    """
    from delaytasks.partitions.conversion import convert

    found = _partitions(cli, shard)
    if not yes:
        if cli.is_json or not sys.stdin.isatty():
            raise click.UsageError("A conversion can not be taken back; say --yes.")
        click.confirm(
            f"Convert {found.tasks.fullname} in {shown_url(cli.stores[shard])} to partitions?",
            abort=True,
            err=True,
        )
    made = convert(found, every, ahead)
    if cli.is_json:
        print_json({"made": made})
    else:
        say(f"{found.tasks.fullname} has {count(len(made), 'partition')} now: {', '.join(made)}")
        which = f" --shard {shard}" if shard else ""
        say(f"from now on run this each day: {cli.command} db partitions maintain{which}")


@partitions.command(epilog=EXIT_CODES)
@_of_shard
@_periods
@click.option(
    "--older-than",
    callback=to_duration,
    metavar="DURATION",
    help="Drop partitions whose tasks are older; those that wait, run or ended later are moved. Without: drop none.",
)
@click.option(
    "--detach", is_flag=True, help="Leave them as tables of their own, instead of dropping them."
)
@pass_cli
def maintain(
    cli: Cli, shard: int, every: timedelta, ahead: int, older_than: timedelta | None, detach: bool
) -> None:
    """Make the partitions that come next, and drop old ones. May run as often as you like; cron is the place.

    \b
    delaytasks db partitions maintain --older-than 30d
    """
    from delaytasks.partitions.pruning import prune

    found, purge_after_s = _partitions(cli, shard), cli.delays.settings.purge_after_s
    if (
        older_than is not None
        and purge_after_s is not None
        and purge_after_s <= older_than.total_seconds()
    ):
        cli.note(
            "The sweep deletes tasks before their partition is old: delaytasks_purge_after_s is the shorter time."
        )
    made = found.extend(every, ahead)
    pruned: list[Pruned] = []
    if not cli.is_json:
        say(f"made {', '.join(made)}" if made else "nothing to make")
    for each in prune(found, older_than, detach) if older_than is not None else ():
        pruned.append(each)
        if not cli.is_json:
            say(_outcome(each, "detached" if detach else "dropped"))
    if cli.is_json:
        print_json({"made": made, "pruned": [each._asdict() for each in pruned]})


def _outcome(pruned: Pruned, done: str) -> str:
    if pruned.moved is None:
        return f"kept {pruned.name}: too many of its tasks wait, run or ended lately"
    return f"{done} {pruned.name}; {count(pruned.moved, 'task')} moved to the default partition"


def _partitions(cli: Cli, shard: int) -> Partitions:
    from delaytasks.partitions.table import Partitions

    if shard >= len(cli.stores):
        raise click.UsageError(
            f"There is no shard {shard}: delaytasks_database_url has {len(cli.stores)}."
        )
    settings = cli.delays.settings
    return Partitions(
        cli.stores[shard].database, settings.table_prefix, settings.table_schema or None
    )


def _shown(instant: datetime | None) -> str | None:
    return None if instant is None else show_instant(instant)
