"""`db shards`: the databases, and what adding one has left to do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli, shown_url
from delaytasks.cli.output import NOTHING, Cell, cell, count, print_json, print_table, say
from delaytasks.core.errors import StoreError
from delaytasks.core.states import Status

if TYPE_CHECKING:
    from delaytasks.sharding.growth import Growth

BAD, GOOD = "red", "green"


@click.command(epilog=EXIT_CODES)
@click.option(
    "--finish",
    is_flag=True,
    help="A shard was added: tell the new homes of keys what stays in the old ones.",
)
@pass_cli
def shards(cli: Cli, finish: bool) -> None:
    """Print the databases: what waits in each, and whether a shard is still being added.

    \b
    delaytasks db shards
    delaytasks db shards --finish

    Exits with 1 while a database is away, or has keys that their new homes do not know of.
    """
    from delaytasks.sharding.growth import Growth

    growth = Growth(cli.delays.routes.databases)
    found = [_look(cli, growth, number, finish) for number in range(len(cli.stores))]
    is_growing = cli.delays.settings.shards_before is not None
    is_finished = all(not each["error"] and (finish or not each["unknown_keys"]) for each in found)
    if cli.is_json:
        print_json({"shards": found, "is_growing": is_growing, "is_finished": is_finished})
    else:
        _print(cli, found, is_growing, is_finished, finish)
    if not is_finished:
        sys.exit(1)


def _look(cli: Cli, growth: Growth, number: int, finish: bool) -> dict[str, Any]:
    from delaytasks.storage import migrations
    from delaytasks.storage.stats import Stats

    store, settings = cli.stores[number], cli.delays.settings
    found: dict[str, Any] = {
        "shard": number,
        "url": shown_url(store),
        "revision": None,
        "waiting": None,
    }
    found |= {"is_estimate": False, "unknown_keys": None, "dead_keys": None, "error": None}
    try:
        found["revision"] = migrations.current(
            store.database, settings.table_prefix, settings.table_schema or None
        )
        found["waiting"], found["is_estimate"] = Stats(store.database, store.schema).counts()[
            Status.NOT_COMPLETE
        ]
        left = growth.finish(number) if finish else growth.left(number)
        found |= {"unknown_keys": len(left.unknown), "dead_keys": len(left.dead)}
    except StoreError as error:
        found["error"] = str(error)
    return found


def _print(
    cli: Cli, found: list[dict[str, Any]], is_growing: bool, is_finished: bool, finish: bool
) -> None:
    rows: list[list[Cell]] = [
        [
            str(each["shard"]),
            cell(each["url"]),
            ("down", BAD) if each["error"] else ("up", GOOD),
            each["revision"] or NOTHING,
            NOTHING
            if each["waiting"] is None
            else f"{'about ' if each['is_estimate'] else ''}{each['waiting']:,}",
        ]
        for each in found
    ]
    print_table(("shard", "database", "is", "revision", "waiting"), rows, right="waiting")
    for each in found:
        if each["error"]:
            say(each["error"], fg=BAD)
    unknown = sum(each["unknown_keys"] or 0 for each in found)
    if unknown:
        done = "know now" if finish else "do not know"
        say(
            f"{count(unknown, 'key')} of live tasks whose homes {done} where the task is",
            fg="yellow",
        )
    if is_growing and is_finished:
        say("Once every process has this list, delaytasks_shards_before can be removed.")
    elif is_growing:
        say(f"Once every process has this list, run: {cli.command} db shards --finish")
