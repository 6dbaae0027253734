"""`cancel`, `reschedule`, `touch` and `retry`: one task, a few, or many."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from delaytasks.cli.bulk import Many, move_each, move_many, takes_many
from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import count, say, sentence, task_json
from delaytasks.cli.times import DURATION, SHIFT, at_option, delay_option
from delaytasks.core.ids import check_id
from delaytasks.core.task import DelayTask
from delaytasks.wiring import wiring_of

_ids = click.argument("ids", nargs=-1, metavar="[ID]...")
_key = click.option("--key", help="With --tag: the one task that has this key.")


@click.command(cls=Command)
@_ids
@_key
@takes_many
@pass_cli
def cancel(cli: Cli, ids: tuple[str, ...], key: str | None, many: Many) -> None:
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
        move_many(cli, "cancelled", many, delays.cancel_many)
        return
    cancelled: list[str] = []
    unchanged: list[str] = []

    def cancel_one(id: int) -> None:
        # With `strict`, the exit code tells a script that the task may have run.
        is_new = bool(delays.cancel(id, strict=True))
        (cancelled if is_new else unchanged).append(str(id))
        if not cli.is_json:
            say(f"cancelled task {id}" if is_new else f"task {id} was cancelled before")

    if key is not None:
        ids = (str(delays.get(tag=many.tag, key=key).id),)
    move_each(cli, ids, cancel_one, lambda: {"cancelled": cancelled, "unchanged": unchanged})


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
    when: datetime | None,
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
    if [delay, when, by].count(None) != 2:
        raise click.UsageError("Give exactly one of --delay, --at and --by.")
    if is_many and version is None:
        reschedule_many = partial(delays.reschedule_many, delay, when=when, by=by)
        move_many(cli, "rescheduled", many, reschedule_many, is_shift=by is not None)
        return
    if is_many or by is not None:
        raise click.UsageError("--version applies to one task, --by to many.")
    task = delays.reschedule(id, delay, when=when, version=version, tag=many.tag, key=key)
    cli.answer_task(task, "rescheduled")
    cli.note_broker_away()


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
        gone = [str(id) for id in delays.touch_many(named, delay)]
    else:
        named, gone = list(dict.fromkeys(keys)), delays.touch_many(tag=tag, keys=keys, delay=delay)
    touched = [name for name in named if name not in gone]
    cli.answer({"touched": touched, "gone": gone}, f"touched {count(len(touched), 'task')}")
    for name in gone:
        cli.note(f"does not wait any more: {name}")
    if gone:
        raise SystemExit(1)


@click.command(cls=Command)
@_ids
@click.option("--delay", type=DURATION, default="0", help="Run after this time [now].")
@takes_many
@pass_cli
def retry(cli: Cli, ids: tuple[str, ...], delay: timedelta, many: Many) -> None:
    """Run FAILED or CANCELLED tasks again: by their ids, or many FAILED ones that match filters.

    \b
    delaytasks retry 2305843009213693952
    delaytasks retry --tag pay.notify --since 2030-01-31T00:00:00Z --dry-run

    Filters match CANCELLED tasks only with --status CANCELLED.
    """
    delays = cli.delays
    if many.is_meant(ids):
        move_many(cli, "retried", many, partial(delays.retry_many, delay))
        return
    retried: list[DelayTask] = []

    def retry_one(id: int) -> None:
        retried.append(delays.retry(id, delay))
        if not cli.is_json:
            say(sentence(retried[-1], "retried", wiring_of(delays).clock.now()))

    move_each(cli, ids, retry_one, lambda: {"retried": [task_json(task) for task in retried]})
    cli.note_broker_away()
