"""Commands that change tasks: cancel, reschedule, touch and rerun, for one or many, and their
audit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, moved_bar, pass_cli, stopping_between_steps
from delaytasks.cli.output import (
    BAD,
    DURATION,
    GOOD,
    INSTANT,
    PAIR,
    PAST,
    SHIFT,
    Failure,
    at_option,
    count,
    delay_option,
    kind_of,
    pairs_or,
    print_json,
    print_table,
    say,
    sentence,
    show_from_now,
    task_json,
)
from delaytasks.core.errors import DelayTaskError, StoreError
from delaytasks.core.filters import BulkResult
from delaytasks.core.ids import check_id
from delaytasks.core.states import Status
from delaytasks.core.task import DelayedTask
from delaytasks.core.text import some_values
from delaytasks.runtime import runtime_of

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
    cli: Cli, ids: Sequence[str], move: Callable[[int], None], moved: Callable[[], dict[str, Any]]
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
            {"id": str(id), "error": cli.hints.rewrite(str(error)), **kind_of(error)}
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
        A method such as `bulk.cancel`.
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
            error.args = (f"{error}; {_how_far(so_far, done)}", *error.args[1:])
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


# -- `cancel`, `reschedule`, `touch` and `rerun`: one task, a few, or many ------------------------


_ids = click.argument("ids", nargs=-1, metavar="[ID]...")
_key = click.option("--key", help="With --tag: the one task that has this key.")


@click.command(cls=Command)
@_ids
@_key
@click.option("--running", is_flag=True, help="Ask tasks that run to stop.")
@takes_many
@pass_cli
def cancel(cli: Cli, ids: tuple[str, ...], key: str | None, running: bool, many: Many) -> None:
    """Cancel waiting tasks: by their ids, by tag and key, or many that match filters.

    \b
    delaytasks cancel 2305843009213693952 2305843009213693953
    delaytasks cancel --tag order.close --key order-7
    delaytasks cancel --tag newsletter.send --key-prefix eu- --dry-run

    It is no error if a task named by its id was cancelled before. A task that runs, has ended or
    does not exist is reported, and the exit code is 1.
    """
    delays = cli.delays
    if many.is_meant(ids, key):
        if running:
            raise click.UsageError("--running is for tasks by id or by key.")
        move_many(cli, "cancelled", many, delays.bulk.cancel)
        return
    cancelled: list[str] = []
    requested: list[str] = []
    unchanged: list[str] = []

    def cancel_one(id: int) -> None:
        result = delays.cancel(id, running=running)
        if result.error is not None:  # the exit code tells a script that the task may have run
            raise result.error
        (requested if result.is_requested else cancelled if result else unchanged).append(str(id))
        if not cli.is_json:
            say(f"cancelled task {id}" if result else result.reason)

    if key is not None:
        ids = (str(delays.get(tag=many.tag, key=key).id),)
    answer = {"cancelled": cancelled, "requested": requested, "unchanged": unchanged}
    move_each(cli, ids, cancel_one, lambda: answer)


@click.command(cls=Command)
@click.argument("id", required=False)
@delay_option
@at_option
@click.option("--by", type=SHIFT, help="Many: this much later, or with a minus sign earlier.")
@click.option("--version", type=int, help="Only if the task still has this version.")
@_key
@takes_many
@pass_cli
def reschedule(
    cli: Cli,
    id: str | None,
    delay: timedelta | None,
    at: datetime | None,
    by: timedelta | None,
    version: int | None,
    key: str | None,
    many: Many,
) -> None:
    """Give a waiting task another time: by its id, by tag and key, or many that match filters.

    \b
    delaytasks reschedule 2305843009213693952 --delay 2h
    delaytasks reschedule --queue reports --until 2030-01-31T18:00:00Z --by 2h --dry-run
    """
    delays, is_many = cli.delays, many.is_meant(() if id is None else (id,), key)
    if [delay, at, by].count(None) != 2:
        raise click.UsageError("Give exactly one of --delay, --at and --by.")
    if is_many and version is None:
        reschedule = partial(delays.bulk.reschedule, delay, at=at, by=by)
        move_many(cli, "rescheduled", many, reschedule, is_shift=by is not None)
        return
    if is_many or by is not None:
        raise click.UsageError("--version applies to one task, --by to many.")
    task = delays.reschedule(id, delay, at=at, version=version, tag=many.tag, key=key)
    cli.answer_task(task, "rescheduled")
    cli.note_broker_away()


@click.command(cls=Command)
@click.option(
    "--over", type=DURATION, required=True, help="The period: 10m, 1h30m, or 90 (seconds)."
)
@click.option(
    "--between",
    type=INSTANT,
    nargs=2,
    metavar="SINCE UNTIL",
    help="Tasks due from the first time on and before the second, as --since and --until.",
)
@takes_many
@pass_cli
def spread(
    cli: Cli, over: timedelta, between: tuple[datetime, datetime] | None, many: Many
) -> None:
    """Distribute the due times of many tasks over a period, so that a peak becomes flat.

    Each task is due up to --over later than before. Overdue tasks are distributed from now on.

    \b
    delaytasks spread --tag mail.send --over 10m --dry-run \\
        --between 2030-01-31T09:00:00Z 2030-01-31T09:01:00Z
    """
    if between:
        many = many.due_between(*between)
    if not many.is_meant():
        raise click.UsageError("Name the tasks by --between or by other filters.")
    move_many(cli, "spread", many, partial(cli.delays.bulk.reschedule, jitter=over), is_shift=True)


@click.command(cls=Command)
@_ids
@delay_option
@click.option("--tag", help="With --key: the tag of these tasks.")
@click.option(
    "--key", "keys", multiple=True, help="With --tag: the task that has this key. Repeatable."
)
@pass_cli
def touch(
    cli: Cli, ids: tuple[str, ...], delay: timedelta | None, tag: str | None, keys: tuple[str, ...]
) -> None:
    """Postpone timeouts: by ids, or by tag and keys. No task becomes due earlier.

    \b
    delaytasks touch 2305843009213693952 2305843009213693953 --delay 2h
    delaytasks touch --tag device.lost --key device-3 --key device-4 --delay 1m
    """
    if delay is None:
        raise click.UsageError("Give --delay.")
    if bool(ids) == bool(keys) or bool(keys) != (tag is not None):
        raise click.UsageError("Name the tasks by ids, or by --tag and --key.")
    delays = cli.delays
    gone: Sequence[Any]
    if tag is None:
        named = [str(check_id(id)) for id in dict.fromkeys(ids)]
        gone = [str(id) for id in delays.touch(named, delay).gone]
    else:
        named = list(dict.fromkeys(keys))
        gone = delays.touch(tag=tag, key=keys, delay=delay).gone
    touched = [name for name in named if name not in gone]
    cli.answer({"touched": touched, "gone": gone}, f"touched {count(len(touched), 'task')}")
    for name in gone:
        cli.note(f"does not wait any more: {name}")
    if gone:
        raise SystemExit(1)


@click.command(cls=Command)
@_ids
@click.option("--delay", type=DURATION, help="Run after this time [now].")
@click.option("--entry", metavar="ID", help="Many: cancelled by this operation that `audit` lists.")
@takes_many
@pass_cli
def rerun(
    cli: Cli, ids: tuple[str, ...], delay: timedelta | None, entry: str | None, many: Many
) -> None:
    """Run FAILED or CANCELLED tasks again: by their ids, or many FAILED ones that match filters.

    \b
    delaytasks rerun 2305843009213693952
    delaytasks rerun --tag pay.notify --since 2030-01-31T00:00:00Z --dry-run

    Filters match CANCELLED tasks only with --status CANCELLED. With --entry, tasks that have not
    moved since their cancel run at their own due times, unless --delay is given.
    """
    delays = cli.delays
    if many.is_meant(ids) or entry is not None:
        if ids:
            raise click.UsageError("Name the tasks by ids or by --entry; not by both.")
        move_many(cli, "rerun", many, partial(delays.bulk.rerun, delay, entry=entry))
        return
    started: list[DelayedTask] = []

    def rerun_one(id: int) -> None:
        started.append(delays.rerun(id, delay or 0))
        if not cli.is_json:
            say(sentence(started[-1], "rerun", runtime_of(delays).clock.now()))

    move_each(cli, ids, rerun_one, lambda: {"rerun": [task_json(task) for task in started]})
    cli.note_broker_away()


# -- `audit`: list the actions on many tasks ------------------------------------------------------


_AUDIT_COLOURS = {"done": GOOD, "failed": BAD, "stopped": "yellow", "running": "cyan"}


@click.command(cls=Command)
@click.option("--limit", type=int, default=20, show_default=True, help="1 to 1000.")
@pass_cli
def audit(cli: Cli, limit: int) -> None:
    """List the actions on many tasks, the newest first: the actor, the filter and the counts.

    \b
    delaytasks audit --limit 5

    If the process of an action died, its state stays `running`, and its time of `seen` stops.
    """
    entries = cli.delays.bulk.log(limit=limit)
    if cli.is_json:
        print_json([entry.as_json() for entry in entries])
        return
    if not entries:
        cli.note("No actions yet.")
        return
    now = runtime_of(cli.delays).clock.now()
    print_table(
        "id,started,actor,action,filter,state,seen,matched,changed,refused".split(","),
        [
            [
                str(entry.id),
                entry.started_at,
                entry.actor,
                entry.action,
                _filter_text(entry.filter),
                (entry.state, _AUDIT_COLOURS.get(entry.state, "")),
                show_from_now(entry.seen_at, now),
                entry.matched,
                entry.changed,
                entry.refused,
            ]
            for entry in entries
        ],
        folded="actor filter",
        extra="seen",
    )


def _filter_text(filter: dict[str, Any]) -> str:
    """Return a filter for the table, which has only the first of many ids. `--json` has all."""
    if "ids" in filter:
        filter = {**filter, "ids": some_values(filter["ids"])}
    return json.dumps(filter, ensure_ascii=False)
