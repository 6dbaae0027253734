"""`db shards`: list the databases, and finish adding one."""

from __future__ import annotations

import sys
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import BAD, GOOD, cell, count, print_json, print_table, say
from delaytasks.core.errors import StoreError
from delaytasks.core.states import Status
from delaytasks.sharding.growth import Growth
from delaytasks.storage import migrations
from delaytasks.storage.stats import Stats


@click.command(cls=Command)
@click.option(
    "--finish",
    is_flag=True,
    help="After a shard was added: record in the new shards of keys which tasks stay in the old.",
)
@pass_cli
def shards(cli: Cli, finish: bool) -> None:
    """Print the databases with their waiting tasks, and whether a shard is still being added.

    \b
    delaytasks db shards
    delaytasks db shards --finish

    Exits with 1 while a database is unavailable, or has keys that their new shards do not know.
    """
    growth = Growth(cli.stores)
    found = [_look(cli, growth, number, finish) for number in range(len(cli.stores))]
    is_growing = cli.delays.settings.shards_before is not None
    is_finished = all(not each["error"] and (finish or not each["unknown_keys"]) for each in found)
    if cli.is_json:
        print_json({"shards": found, "is_growing": is_growing, "is_finished": is_finished})
    else:
        _print(found, finish)
        if is_growing and is_finished:
            say("Once every process has this list, delaytasks_shards_before can be removed.")
        elif is_growing:
            say(f"Once every process has this list, run: {cli.command} db shards --finish")
    if not is_finished:
        sys.exit(1)


def _look(cli: Cli, growth: Growth, number: int, finish: bool) -> dict[str, Any]:
    store = cli.stores[number]
    found: dict[str, Any] = {
        "shard": number,
        "url": store.database.shown_url,
        "revision": None,
        "waiting": None,
        "is_estimate": False,
        "unknown_keys": None,
        "dead_keys": None,
        "error": None,
    }
    try:
        found["revision"] = migrations.current(*cli.tables(store))
        counts = Stats(store.database, store.schema).counts()
        found["waiting"], found["is_estimate"] = counts[Status.NOT_COMPLETE]
        left = growth.finish(number) if finish else growth.left(number)
        found |= {"unknown_keys": len(left.unknown), "dead_keys": len(left.dead)}
    except StoreError as error:
        found["error"] = str(error)
    return found


def _print(found: list[dict[str, Any]], finish: bool) -> None:
    print_table(
        ("shard", "database", "is", "revision", "waiting"),
        [
            [
                each["shard"],
                each["url"],
                ("down", BAD) if each["error"] else ("up", GOOD),
                each["revision"],
                f"{'about ' if each['is_estimate'] else ''}{cell(each['waiting'])}",
            ]
            for each in found
        ],
        right=["waiting"],
    )
    for each in found:
        if each["error"]:
            say(each["error"], fg=BAD)
    unknown = sum(each["unknown_keys"] or 0 for each in found)
    if unknown:
        done = "know now" if finish else "do not know"
        keys = count(unknown, "key")
        say(f"{keys} of live tasks: their shards {done} where the tasks are", fg="yellow")
