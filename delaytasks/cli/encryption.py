"""`encryption`: make a key, count the tasks of each key, and encrypt all with the first key."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import click

from delaytasks.cli.context import Cli, Group, pass_cli
from delaytasks.cli.output import BAD, GOOD, count, print_json, print_table, say
from delaytasks.cli.progress import moved_bar, stopping_between_steps
from delaytasks.core.encryption import PLAIN, UNBOUND_PREFIX, key_name, names_of, new_key
from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.states import LIVE, Status
from delaytasks.encryption.key_rotation import Rotation

_KEY_COLOURS = {"first": GOOD, "old form": "yellow", "missing": BAD}


@click.group(cls=Group)
def encryption() -> None:
    """Keys of bodies that are stored encrypted (delaytasks_encryption_keys).

    \b
    delaytasks encryption status
    """


_all = click.option(
    "--all", "is_all", is_flag=True, help="Finished tasks as well; this reads the whole table."
)
_EXIT_CODES_OF_ENCRYPTION = (
    "Exit codes: 0 it worked; 1 no key here reads some of the tasks, or a database is unavailable; "
    "2 wrong usage."
)


@encryption.command()
@pass_cli
def key(cli: Cli) -> None:
    """Print a new key for delaytasks_encryption_keys, without storing it.

    \b
    delaytasks encryption key
    """
    made = new_key()
    cli.answer({"key": made, "name": key_name(made)}, made)


@encryption.command(epilog=_EXIT_CODES_OF_ENCRYPTION)
@_all
@pass_cli
def status(cli: Cli, is_all: bool) -> None:
    """Print how many tasks need each key.

    A key that no task needs can be removed from delaytasks_encryption_keys.

    \b
    delaytasks encryption status --all
    """
    tasks = _Tasks(cli, is_all)
    keys = tasks.keys()
    if cli.is_json:
        print_json({"keys": keys, "missing": tasks.missing})
    else:
        _print(cli, keys, tasks.missing)
    if tasks.missing or _has_missing_key(keys):
        sys.exit(1)


@encryption.command(epilog=_EXIT_CODES_OF_ENCRYPTION)
@_all
@pass_cli
def rotate(cli: Cli, is_all: bool) -> None:
    """Encrypt with the first key all tasks that are plain, that need another key, or whose text is
    not bound to their row. If the first key is 'plain', decrypt them.

    Workers and producers may run meanwhile. After Ctrl-C the current step ends; the next call
    continues.

    \b
    delaytasks encryption rotate
    """
    names = names_of(cli.delays.settings.encryption_keys)
    if not names:
        raise ConfigError("delaytasks_encryption_keys is empty: there is no key to encrypt with")
    done = "decrypted" if names[0] == PLAIN else "encrypted"
    tasks = _Tasks(cli, is_all)
    is_stopped = tasks.rotate(done)
    keys = [] if is_stopped else tasks.keys()
    if cli.is_json:
        print_json(
            {
                "changed": tasks.changed,
                "unreadable": tasks.unreadable,
                "state": "stopped" if is_stopped else "done",
                "keys": keys,
                "missing": tasks.missing,
            }
        )
    else:
        say(f"{'stopped: ' if is_stopped else ''}{done} {count(tasks.changed, 'task')}")
        if tasks.unreadable:
            left = count(tasks.unreadable, "task")
            cli.note(f"left as they are: {left} (no key here reads them)")
        if not is_stopped:
            _print(cli, keys, tasks.missing)
    if is_stopped or tasks.missing or tasks.unreadable or _has_missing_key(keys):
        sys.exit(1)


class _Tasks:
    """The tasks of all databases, by the keys that they need."""

    def __init__(self, cli: Cli, is_all: bool) -> None:
        self._cli = cli
        self._is_all = is_all
        self._statuses = frozenset(Status) if is_all else LIVE
        self._rotations = [Rotation(s.database, s.schema, s.bulk) for s in cli.stores]
        #: The numbers of the databases that cannot be reached.
        self.missing: list[int] = []

    @property
    def changed(self) -> int:
        return sum(rotation.changed for rotation in self._rotations)

    @property
    def unreadable(self) -> int:
        return sum(rotation.unreadable for rotation in self._rotations)

    def rotate(self, done: str) -> bool:
        """Encrypt with the first key; return whether Ctrl-C stopped it."""
        with moved_bar(self._cli, done) as progress, stopping_between_steps() as check:
            bar = progress.add_task("", total=None, moved=0)

            def on_step() -> None:
                completed = self.changed + self.unreadable
                found = sum(rotation.found for rotation in self._rotations)
                progress.update(bar, total=found, completed=completed, moved=self.changed)
                check()

            try:
                self._each(lambda rotation: rotation.rotate(self._statuses, on_step))
            except KeyboardInterrupt:
                return True
        return False

    def keys(self) -> list[dict[str, Any]]:
        """Return the number of tasks of each key, the configured keys first."""
        live, finished = Counter[str](), Counter[str]()

        def look(rotation: Rotation) -> None:
            needs = rotation.needs(self._statuses)
            for counts, found in ((live, needs.live), (finished, needs.finished)):
                counts.update({name or PLAIN: number for name, number in found.items()})

        self._each(look)
        first, *others = names_of(self._cli.delays.settings.encryption_keys) or [PLAIN]
        kinds = {first: "first", **dict.fromkeys(others, "reads")}
        # Texts that are not bound to their task are counted separately: `rotate` binds them.
        unbound = [name for name in map(UNBOUND_PREFIX.__add__, kinds) if name in live | finished]
        kinds |= dict.fromkeys(unbound, "old form")
        for name in sorted((live | finished).keys() - kinds.keys()):
            kinds[name] = "no key" if name == PLAIN else "missing"
        return [
            {
                "key": name,
                "is": kind,
                "live": live[name],
                "finished": finished[name] if self._is_all else None,
            }
            for name, kind in kinds.items()
        ]

    def _each(self, work: Callable[[Rotation], object]) -> None:
        """Call `work` for each database. Of several, one that cannot be reached is skipped."""
        for number, rotation in enumerate(self._rotations):
            if number not in self.missing:
                try:
                    work(rotation)
                except StoreUnavailableError:
                    if len(self._rotations) == 1:
                        raise
                    self.missing.append(number)


def _print(cli: Cli, keys: Sequence[dict[str, Any]], missing: Sequence[int]) -> None:
    print_table(
        ("key", "is", "live tasks", "finished"),
        [
            [
                each["key"],
                (each["is"], _KEY_COLOURS.get(each["is"], "")),
                each["live"],
                each["finished"],
            ]
            for each in keys
        ],
    )
    cli.note_missing(missing)


def _has_missing_key(keys: Sequence[dict[str, Any]]) -> bool:
    return any(each["is"] == "missing" for each in keys)
