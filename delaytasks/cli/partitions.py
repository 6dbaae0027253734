"""`db partitions`: the task table in partitions by time, on PostgreSQL."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta

import click

from delaytasks.cli.context import Cli, Group, pass_cli
from delaytasks.cli.output import count, print_json, print_table, say
from delaytasks.cli.times import DAYS, DURATION, show_instant
from delaytasks.partitions import conversion
from delaytasks.partitions.pruning import Pruned, prune
from delaytasks.partitions.table import Partitions


@click.group(cls=Group)
def partitions() -> None:
    """Keep the task table in partitions by time, and drop old tasks by whole partitions. PostgreSQL
    only.

    \b
    delaytasks db partitions list
    """


def _periods(command: Callable[..., None]) -> Callable[..., None]:
    every = click.option(
        "--every", type=DAYS, default="7d", show_default=True, help="The time of one partition."
    )
    ahead = click.option(
        "--ahead",
        type=click.IntRange(1, 100),
        default=4,
        show_default=True,
        help="The number of partitions that begin after now.",
    )
    return every(ahead(command))


_of_shard = click.option(
    "--shard",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With several databases: the number of the database.",
)


@partitions.command("list")
@_of_shard
@pass_cli
def list_(cli: Cli, shard: int) -> None:
    """Print the partitions: the scheduling times of their tasks, their sizes, and their live tasks.

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
        [
            [p.name, p.since, p.until, p.rows, f"{p.bytes / 1e6:,.1f}", live.get(p.name, 0)]
            for p in parts
        ],
        right=["MB"],
    )


@partitions.command()
@_of_shard
@_periods
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_cli
def convert(cli: Cli, shard: int, every: timedelta, ahead: int, yes: bool) -> None:
    """Make the task table the first of its partitions. Workers and producers may run meanwhile.

    The database user must own the tables. A conversion cannot be undone.

    \b
    delaytasks db partitions convert --every 7d --yes
    """
    found = _partitions(cli, shard)
    name = found.tasks.fullname
    cli.require_terminal(yes, "A conversion cannot be undone; use --yes.")
    cli.confirm(yes, f"Convert {name} in {cli.stores[shard].database.shown_url} to partitions?")
    made = conversion.convert(found, every, ahead)
    if cli.is_json:
        print_json({"made": made})
        return
    say(f"{name} has {count(len(made), 'partition')} now: {', '.join(made)}")
    which = f" --shard {shard}" if shard else ""
    say(f"from now on run this each day: {cli.command} db partitions maintain{which}")


@partitions.command()
@_of_shard
@_periods
@click.option(
    "--older-than",
    type=DURATION,
    help="Drop partitions whose tasks are older. Tasks that wait, run or ended later are moved "
    "first. Without it no partition is dropped.",
)
@click.option("--detach", is_flag=True, help="Keep old partitions as separate tables.")
@pass_cli
def maintain(
    cli: Cli, shard: int, every: timedelta, ahead: int, older_than: timedelta | None, detach: bool
) -> None:
    """Make the next partitions, and drop old ones. Run it at least daily, for example with cron.

    \b
    delaytasks db partitions maintain --older-than 30d
    """
    found, purge_after_s = _partitions(cli, shard), cli.delays.settings.purge_after_s
    if older_than is not None and (purge_after_s or math.inf) <= older_than.total_seconds():
        cli.note(
            "The sweep deletes tasks before their partition is old, "
            "because delaytasks_purge_after_s is the shorter time."
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
    if shard >= len(cli.stores):
        raise click.UsageError(
            f"There is no shard {shard}: delaytasks_database_url has {len(cli.stores)}."
        )
    return Partitions(*cli.tables(cli.stores[shard]))


def _shown(instant: datetime | None) -> str | None:
    return None if instant is None else show_instant(instant)
