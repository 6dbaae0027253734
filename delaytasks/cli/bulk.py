"""The options by which many tasks are named, and the way from their count to their move."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from delaytasks.cli.context import Cli
from delaytasks.cli.output import count, print_json, say
from delaytasks.cli.progress import progress_bar, stopping_between_steps
from delaytasks.cli.times import to_past
from delaytasks.core.bulk import BulkResult
from delaytasks.core.errors import StoreError
from delaytasks.core.states import Status


def _instant(name: str, about: str) -> Callable[[Any], Any]:
    return click.option(name, callback=to_past, metavar="TIME", help=f"Many: {about}")


_FILTERS = {
    "tag": click.option("--tag", help="Many: of this tag."),
    "key_prefix": click.option("--key-prefix", metavar="TEXT", help="Many: whose key begins so."),
    "status": click.option(
        "--status",
        type=click.Choice([s.name for s in Status], case_sensitive=False),
        help="Many: that have it.",
    ),
    "queue": click.option("--queue", help="Many: of this queue."),
    "since": _instant(
        "--since", "due at this time or later, as 2030-01-31T18:00:00Z, or 1h for an hour ago."
    ),
    "until": _instant("--until", "due before this time."),
    "created_since": _instant("--created-since", "scheduled at this time or later."),
    "created_until": _instant("--created-until", "scheduled before it."),
    "updated_until": _instant("--updated-until", "not moved since this time."),
}
_HOW = {
    "everything": click.option(
        "--everything", is_flag=True, help="Many: all tasks that there are."
    ),
    "dry_run": click.option("--dry-run", is_flag=True, help="Many: only count them."),
    "yes": click.option("--yes", is_flag=True, help="Many: do not ask."),
}


@dataclass(frozen=True)
class Many:
    """What was said of many tasks."""

    filters: dict[str, Any]
    everything: bool
    dry_run: bool
    yes: bool

    @property
    def tag(self) -> str | None:
        tag: str | None = self.filters["tag"]
        return tag

    def is_meant(self, ids: tuple[str, ...] = (), key: str | None = None) -> bool:
        """Whether many tasks are named, and not some by their ids or one by its key."""
        says_more = any(value is not None for name, value in self.filters.items() if name != "tag")
        says_more = says_more or self.everything or self.dry_run or self.yes
        if (ids and (says_more or self.tag is not None or key is not None)) or (
            key is not None and says_more
        ):
            raise click.UsageError(
                "Give ids, or --tag and --key, or what many tasks have in common; one of the three."
            )
        return says_more or (self.tag is not None and key is None)


def takes_many(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command these options, as its argument `many`."""

    @functools.wraps(command)
    def with_many(*args: Any, **options: Any) -> Any:
        filters = {name: options.pop(name) for name in _FILTERS}
        return command(*args, many=Many(filters, *(options.pop(name) for name in _HOW)), **options)

    for option in reversed([*_FILTERS.values(), *_HOW.values()]):
        with_many = option(with_many)
    return with_many


def move_many(
    cli: Cli, done: str, many: Many, move: Callable[..., BulkResult], is_shift: bool = False
) -> None:
    """Counted, asked for, moved in steps. `move` is a verb such as `cancel_many`; `done` is what it did."""
    if not (many.yes or many.dry_run) and (cli.is_json or not sys.stdin.isatty()):
        raise click.UsageError(
            "Many tasks would be moved: count them with --dry-run, then say --yes."
        )
    move = functools.partial(move, everything=many.everything, **many.filters)
    found = move(dry_run=True)
    would = f"{count(found.matched - found.refused, 'task')} would be {done}"
    if many.dry_run:
        _tell(cli, found, would, "dry run")
        return
    if not many.yes:
        running = f" ({found.refused:,} run now, and are left alone)" if found.refused else ""
        click.confirm(f"{would}{running}. Go on?", abort=True, err=True)
    result, is_stopped = _moved(cli, done, found, move)
    if is_stopped:
        again = f", with --updated-until {found.started.isoformat()}" if is_shift else ""
        _tell(
            cli,
            result,
            f"stopped: {_how_far(result, done)}; to go on run it again{again}",
            "stopped",
        )
        raise SystemExit(1)
    _tell(cli, result, f"{done} {count(result.changed, 'task')}", "done")
    cli.note_broker_away()


def _moved(
    cli: Cli, done: str, found: BulkResult, move: Callable[..., BulkResult]
) -> tuple[BulkResult, bool]:
    """What became of them, and whether somebody stopped it."""
    so_far = found
    with progress_bar(cli, done) as progress, stopping_between_steps() as check:
        bar = progress.add_task("", total=found.matched, moved=0)

        def on_progress(result: BulkResult) -> None:
            nonlocal so_far
            so_far = result
            progress.update(
                bar,
                total=result.matched,
                completed=result.changed + result.refused,
                moved=result.changed,
            )
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


def _tell(cli: Cli, result: BulkResult, sentence: str, state: str) -> None:
    if cli.is_json:
        counts = {"matched": result.matched, "changed": result.changed, "refused": result.refused}
        runs = [str(id) for id in result.runs]
        print_json({**counts, "state": state, "runs": runs, "missing": result.missing})
    else:
        say(sentence)
        if result.refused:
            why = (
                "they run"
                if state == "dry run"
                else "they run or moved on, are locked, or another task has their key"
            )
            cli.note(f"left as they are: {count(result.refused, 'task')} ({why})")
        if result.missing:
            cli.note(
                f"Not all tasks: {', '.join(f'shard {number}' for number in result.missing)} can not be reached."
            )
    if result.missing:
        raise SystemExit(1)
