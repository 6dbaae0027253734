"""`encryption`: a new key, which keys the tasks need, and how they come to need the first one alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import NOTHING, Cell, count, print_json, print_table, say
from delaytasks.cli.progress import progress_bar, stopping_between_steps
from delaytasks.core.encryption import PLAIN, UNBOUND_PREFIX, key_name, names_of, new_key
from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.states import LIVE, Status

if TYPE_CHECKING:
    from delaytasks.encryption.key_rotation import Rotation

_COLOURS = {"first": "green", "old form": "yellow", "missing": "red"}


@click.group(epilog=EXIT_CODES)
def encryption() -> None:
    """Keys of bodies that are stored encrypted (delaytasks_encryption_keys).

    \b
    delaytasks encryption status
    """


_all = click.option(
    "--all", "is_all", is_flag=True, help="Finished tasks as well; that reads the whole table."
)
_CODES = "Exit codes: 0 it worked; 1 there are tasks that no key here reads, or a database is away; 2 wrong usage."


@encryption.command(epilog=EXIT_CODES)
@pass_cli
def key(cli: Cli) -> None:
    """Print a new key, for delaytasks_encryption_keys. It is kept nowhere.

    \b
    delaytasks encryption key
    """
    made = new_key()
    if cli.is_json:
        print_json({"key": made, "name": key_name(made)})
    else:
        say(made)


@encryption.command(epilog=_CODES)
@_all
@pass_cli
def status(cli: Cli, is_all: bool) -> None:
    """Print how many tasks need each key. One that none of them needs can leave delaytasks_encryption_keys.

    \b
    delaytasks encryption status --all
    """
    rotations, missing = _rotations(cli), list[int]()
    keys = _look(cli, rotations, is_all, missing)
    if cli.is_json:
        print_json({"keys": keys, "missing": missing})
    else:
        _print(cli, keys, missing)
    _end(keys, missing)


@encryption.command(epilog=_CODES)
@_all
@pass_cli
def rotate(cli: Cli, is_all: bool) -> None:
    """Encrypt with the first key the tasks that are plain, need another one or are not bound to their row; with 'plain'
    as the first, decrypt them.

    Workers and producers may go on meanwhile. Ctrl-C lets the step end that is under way; run again it goes on.

    \b
    delaytasks encryption rotate
    """
    names = names_of(cli.delays.settings.encryption_keys)
    if not names:
        raise ConfigError("delaytasks_encryption_keys is empty: there is no key to encrypt with")
    done = "decrypted" if names[0] == PLAIN else "encrypted"
    rotations, missing = _rotations(cli), list[int]()
    is_stopped = _rotate(cli, rotations, is_all, missing, done)
    changed, unreadable = (
        sum(getattr(each, name) for each in rotations) for name in ("changed", "unreadable")
    )
    keys = [] if is_stopped else _look(cli, rotations, is_all, missing)
    if cli.is_json:
        state = "stopped" if is_stopped else "done"
        print_json(
            {
                "changed": changed,
                "unreadable": unreadable,
                "state": state,
                "keys": keys,
                "missing": missing,
            }
        )
    else:
        say(f"{'stopped: ' if is_stopped else ''}{done} {count(changed, 'task')}")
        if unreadable:
            cli.note(f"left as they are: {count(unreadable, 'task')} (no key here reads them)")
        if not is_stopped:
            _print(cli, keys, missing)
    if is_stopped:
        sys.exit(1)
    _end(keys, missing, unreadable)


# -- inside ---------------------------------------------------------------------------------------


def _rotations(cli: Cli) -> list[Rotation]:
    from delaytasks.encryption.key_rotation import Rotation

    return [Rotation(store.database, store.schema, store.bulk) for store in cli.stores]


def _each(
    rotations: Sequence[Rotation], work: Callable[[Rotation], object], missing: list[int]
) -> None:
    """Shard by shard: one that is down is told, and the others are done."""
    for number, rotation in enumerate(rotations):
        if number not in missing:
            try:
                work(rotation)
            except StoreUnavailableError:
                if len(rotations) == 1:
                    raise
                missing.append(number)


def _rotate(
    cli: Cli, rotations: Sequence[Rotation], is_all: bool, missing: list[int], done: str
) -> bool:
    """Whether somebody stopped it."""
    with progress_bar(cli, done) as progress, stopping_between_steps() as check:
        bar = progress.add_task("", total=None, moved=0)

        def tell() -> None:
            found, changed = (
                sum(each.found for each in rotations),
                sum(each.changed for each in rotations),
            )
            completed = changed + sum(each.unreadable for each in rotations)
            progress.update(bar, total=found, completed=completed, moved=changed)
            check()

        try:
            _each(rotations, lambda rotation: rotation.rotate(_statuses(is_all), tell), missing)
        except KeyboardInterrupt:
            return True
    return False


def _statuses(is_all: bool) -> frozenset[Status]:
    return frozenset(Status) if is_all else LIVE


def _look(
    cli: Cli, rotations: Sequence[Rotation], is_all: bool, missing: list[int]
) -> list[dict[str, Any]]:
    live, finished = Counter[str](), Counter[str]()

    def look(rotation: Rotation) -> None:
        needs = rotation.needs(_statuses(is_all))
        live.update(needs.live)
        finished.update(needs.finished)

    _each(rotations, look, missing)
    first, *others = names_of(cli.delays.settings.encryption_keys) or [PLAIN]
    kinds = {first: "first", **dict.fromkeys(others, "reads")}
    # Texts that are not bound to their task have a line of their own: `rotate` binds them.
    kinds |= {
        UNBOUND_PREFIX + name: "old form"
        for name in kinds
        if UNBOUND_PREFIX + name in live | finished
    }
    found = {name or PLAIN: (live[name], finished[name]) for name in live | finished}
    names = dict.fromkeys([*kinds, *sorted(found.keys() - kinds.keys())])
    return [
        {
            "key": name,
            "is": kinds.get(name, "no key" if name == PLAIN else "missing"),
            "live": found.get(name, (0, 0))[0],
            "finished": found.get(name, (0, 0))[1] if is_all else None,
        }
        for name in names
    ]


def _print(cli: Cli, keys: Sequence[dict[str, Any]], missing: Sequence[int]) -> None:
    rows: list[list[Cell]] = [
        [
            each["key"],
            (each["is"], _COLOURS.get(each["is"], "")),
            f"{each['live']:,}",
            NOTHING if each["finished"] is None else f"{each['finished']:,}",
        ]
        for each in keys
    ]
    print_table(("key", "is", "live tasks", "finished"), rows, right="live tasks finished")
    if missing:
        cli.note(
            f"Not all tasks: {', '.join(f'shard {number}' for number in missing)} can not be reached."
        )


def _end(keys: Sequence[dict[str, Any]], missing: Sequence[int], unreadable: int = 0) -> None:
    if missing or unreadable or any(each["is"] == "missing" for each in keys):
        sys.exit(1)
