"""`cancel`, `reschedule`, `touch` and `rerun`: one task, a few, or many."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from delaytasks.cli.bulk import Many, move_each, move_many, takes_many
from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import count, say, sentence, task_json
from delaytasks.cli.times import DURATION, INSTANT, SHIFT, at_option, delay_option
from delaytasks.core.ids import check_id
from delaytasks.core.task import DelayTask
from delaytasks.runtime import runtime_of

_ids = click.argument("ids", nargs=-1, metavar="[ID]...")
_key = click.option("--key", help="With --tag: the one task that has this key.")


@click.command(cls=Command)
@_ids
@_key
@click.option("--running", is_flag=True, help="Ask tasks that run to stop.")
@takes_many
@pass_cli
def cancel(
    cli: Cli,
    ids: tuple[str, ...],
    key: str | None,
    running: bool,
    many: Many,
) -> None:
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
        move_many(cli, "cancelled", many, delays.cancel_many)
        return
    cancelled: list[str] = []
    requested: list[str] = []
    unchanged: list[str] = []

    def cancel_one(id: int) -> None:
        # With `strict`, the exit code tells a script that the task may have run.
        result = delays.cancel(id, strict=True, running=running)
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
        reschedule_many = partial(delays.reschedule_many, delay, at=at, by=by)
        move_many(cli, "rescheduled", many, reschedule_many, is_shift=by is not None)
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
    reschedule_many = partial(cli.delays.reschedule_many, spread=over)
    move_many(cli, "spread", many, reschedule_many, is_shift=True)


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
        gone = [str(id) for id in delays.touch_many(named, delay).gone]
    else:
        named = list(dict.fromkeys(keys))
        gone = delays.touch_many(tag=tag, keys=keys, delay=delay).gone
    touched = [name for name in named if name not in gone]
    cli.answer({"touched": touched, "gone": gone}, f"touched {count(len(touched), 'task')}")
    for name in gone:
        cli.note(f"does not wait any more: {name}")
    if gone:
        raise SystemExit(1)


@click.command(cls=Command)
@_ids
@click.option("--delay", type=DURATION, help="Run after this time [now].")
@click.option("--audit", metavar="ID", help="Many: cancelled by this operation that `audit` lists.")
@takes_many
@pass_cli
def rerun(
    cli: Cli, ids: tuple[str, ...], delay: timedelta | None, audit: str | None, many: Many
) -> None:
    """Run FAILED or CANCELLED tasks again: by their ids, or many FAILED ones that match filters.

    \b
    delaytasks rerun 2305843009213693952
    delaytasks rerun --tag pay.notify --since 2030-01-31T00:00:00Z --dry-run

    Filters match CANCELLED tasks only with --status CANCELLED. With --audit, tasks that have not
    moved since their cancel run at their own due times, unless --delay is given.
    """
    delays = cli.delays
    if many.is_meant(ids) or audit is not None:
        if ids:
            raise click.UsageError("Name the tasks by ids or by --audit; not by both.")
        move_many(cli, "rerun", many, partial(delays.rerun_many, delay, audit=audit))
        return
    started: list[DelayTask] = []

    def rerun_one(id: int) -> None:
        started.append(delays.rerun(id, delay or 0))
        if not cli.is_json:
            say(sentence(started[-1], "rerun", runtime_of(delays).clock.now()))

    move_each(cli, ids, rerun_one, lambda: {"rerun": [task_json(task) for task in started]})
    cli.note_broker_away()
