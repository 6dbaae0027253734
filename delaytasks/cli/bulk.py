"""The commands on one, a few or many tasks: their options, and the two ways of moving tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.context import Cli
from delaytasks.cli.output import Failure, count, print_json
from delaytasks.cli.progress import moved_bar, stopping_between_steps
from delaytasks.cli.times import PAIR, PAST, pairs_or
from delaytasks.core.errors import DelayTaskError, StoreError
from delaytasks.core.filters import BulkResult
from delaytasks.core.ids import check_id
from delaytasks.core.states import Status

_STATUS = click.Choice([s.name for s in Status], case_sensitive=False)
#: The options that select many tasks: the names are those of `core.filters.Filters`.
FILTERS: dict[str, dict[str, Any]] = {
    "tag": {"help": "of this tag."},
    "ids": {"multiple": True, "metavar": "ID", "help": "with this id. Repeatable."},
    "key_prefix": {"metavar": "TEXT", "help": "with a key that begins with this text."},
    "status": {"type": _STATUS, "multiple": True, "help": "of this status. Repeatable."},
    "queue": {"help": "of this queue."},
    "meta": {
        "type": PAIR,
        "multiple": True,
        "metavar": "NAME=VALUE",
        "help": "with this pair. Repeatable.",
    },
    "error": {
        "metavar": "PATTERN",
        "help": "whose last error matches; * stands for any text, as '*timeout*'.",
    },
    "since": {
        "type": PAST,
        "help": "due at this time or later, as 2030-01-31T18:00:00Z, or 1h for an hour ago.",
    },
    "until": {"type": PAST, "help": "due before this time."},
    "created_since": {"type": PAST, "help": "scheduled at this time or later."},
    "created_until": {"type": PAST, "help": "scheduled before this time."},
    "updated_until": {"type": PAST, "help": "not moved since this time."},
}
_FLAGS: dict[str, dict[str, Any]] = {
    "everything": {"is_flag": True, "help": "all tasks."},
    "dry_run": {"is_flag": True, "help": "only count them."},
    "yes": {"is_flag": True, "help": "do not ask."},
}


@dataclass(frozen=True)
class Many:
    """The filters of a command on many tasks, and how to go about it."""

    filters: dict[str, Any]
    everything: bool
    dry_run: bool
    yes: bool

    @property
    def tag(self) -> str | None:
        tag: str | None = self.filters["tag"]
        return tag

    def due_between(self, since: datetime, until: datetime) -> Many:
        """Return the same options with the range of due times of `--between`."""
        if self.filters["since"] is not None or self.filters["until"] is not None:
            raise click.UsageError("--between names both ends; leave out --since and --until.")
        return replace(self, filters={**self.filters, "since": since, "until": until})

    def is_meant(self, ids: tuple[str, ...] = (), key: str | None = None) -> bool:
        """Return whether the options name many tasks, instead of some by id or one by key."""
        has_filter = any(value is not None for n, value in self.filters.items() if n != "tag")
        has_filter = has_filter or self.everything or self.dry_run or self.yes
        has_tag, has_key = self.tag is not None, key is not None
        if (ids and (has_filter or has_tag or has_key)) or (has_key and has_filter):
            raise click.UsageError(
                "Name the tasks by ids, by --tag and --key, or by filters; not by several."
            )
        return has_filter or (has_tag and not has_key)


def takes_many(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of many tasks to a command, which receives them as its argument `many`."""

    @functools.wraps(command)
    def with_many(*args: Any, **options: Any) -> Any:
        filters = {name: pairs_or(options.pop(f"filter_{name}")) for name in FILTERS}
        flags = {name: options.pop(name) for name in _FLAGS}
        return command(*args, many=Many(filters, **flags), **options)

    # Some commands have an argument `ids`, so the filters are passed by other names.
    passed = {name: f"filter_{name}" for name in FILTERS} | {name: name for name in _FLAGS}
    for name, attributes in reversed([*FILTERS.items(), *_FLAGS.items()]):
        attributes = {**attributes, "help": f"Many: {attributes['help']}"}
        with_many = click.option(option_of(name), passed[name], **attributes)(with_many)
    return with_many


def option_of(name: str) -> str:
    """Return the option of a filter."""
    return "--id" if name == "ids" else f"--{name.replace('_', '-')}"


# -- a few tasks ----------------------------------------------------------------------------------


def move_each(
    cli: Cli,
    ids: Sequence[str],
    move: Callable[[int], None],
    moved: Callable[[], dict[str, Any]],
) -> None:
    """Call `move` for each id, even if another id fails. A text that is no id prevents all."""
    if not ids:
        raise click.UsageError("Name the tasks by ids or by filters.")
    failures: list[tuple[int, DelayTaskError]] = []
    for id in [check_id(text) for text in ids]:
        try:
            move(id)
        except DelayTaskError as error:
            failures.append((id, error))
            if isinstance(error, StoreError):
                break  # the next id would wait as long, for the same answer
    if cli.is_json:
        failed = [
            {"id": str(id), "error": cli.hints.rewrite(str(error)), "type": type(error).__name__}
            for id, error in failures
        ]
        print_json({**moved(), "failed": failed})
    if failures:
        if not cli.is_json:
            for _, earlier in failures[:-1]:
                Failure(earlier, cli.is_json, rewrite=cli.hints.rewrite).show()
        raise failures[-1][1]


# -- many tasks -----------------------------------------------------------------------------------


def move_many(
    cli: Cli, done: str, many: Many, move: Callable[..., BulkResult], is_shift: bool = False
) -> None:
    """Count the tasks, ask the user, and move them in steps.

    Parameters
    ----------
    done
        What `move` does to a task, as a participle: "cancelled".
    move
        A method such as `cancel_many`.
    is_shift
        Whether a second call would move the tasks again, so that it needs one more filter.
    """
    if not many.dry_run:
        cli.require_terminal(many.yes, "Count the tasks with --dry-run, then use --yes.")
    move = functools.partial(move, everything=many.everything, **many.filters)
    found = move(dry_run=True)
    would = f"{count(found.matched - found.refused, 'task')} would be {done}"
    if many.dry_run:
        _report(cli, found, would, "dry run")
        return
    running = f" (without {count(found.refused, 'running task')})" if found.refused else ""
    cli.confirm(many.yes, f"{would}{running}. Go on?")
    result, is_stopped = _moved(cli, done, found, move)
    if is_stopped:
        again = f", with --updated-until {found.started.isoformat()}" if is_shift else ""
        how_far = _how_far(result, done)
        _report(cli, result, f"stopped: {how_far}; to go on run it again{again}", "stopped")
        raise SystemExit(1)
    _report(cli, result, f"{done} {count(result.changed, 'task')}", "done")
    cli.note_broker_away()


def _moved(
    cli: Cli, done: str, found: BulkResult, move: Callable[..., BulkResult]
) -> tuple[BulkResult, bool]:
    """Return the result, and whether Ctrl-C stopped the action."""
    so_far = found
    with moved_bar(cli, done) as progress, stopping_between_steps() as check:
        bar = progress.add_task("", total=found.matched, moved=0)

        def on_progress(result: BulkResult) -> None:
            nonlocal so_far
            so_far = result
            completed = result.changed + result.refused
            progress.update(bar, total=result.matched, completed=completed, moved=result.changed)
            check()

        try:
            return move(on_progress=on_progress), False
        except KeyboardInterrupt:
            return so_far, True
        except StoreError as error:
            error.args = (f"{error}; {_how_far(so_far, done)}",)
            raise


def _how_far(so_far: BulkResult, done: str) -> str:
    return f"{done} {so_far.changed:,} of {count(so_far.matched, 'task')}"


def _report(cli: Cli, result: BulkResult, sentence: str, state: str) -> None:
    document = {
        "matched": result.matched,
        "changed": result.changed,
        "refused": result.refused,
        "state": state,
        "runs": [str(id) for id in result.runs],
    }
    cli.answer(document, sentence)
    if result.refused:
        moved = "they run or moved on, are locked, or another task has their key"
        why = "they run" if state == "dry run" else moved
        cli.note(f"left as they are: {count(result.refused, 'task')} ({why})")
