"""`schedule`: one task, or many from a file."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import count
from delaytasks.cli.progress import moved_bar
from delaytasks.cli.times import PAIR, at_option, delay_option, pairs_or, parse_instant
from delaytasks.client import DelayTasks
from delaytasks.core.errors import (
    BodyNotJSONError,
    DelayTaskError,
    InvalidInputError,
    InvalidScheduleError,
)
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import parse_duration
from delaytasks.core.task import DelayTask, NewTask, OnConflict
from delaytasks.runtime import runtime_of

if TYPE_CHECKING:
    from rich.progress import Progress


_LINE_FIELDS = NewTask._fields


@click.command(cls=Command)
@click.argument("tag", required=False)
@click.argument("body", required=False)
@delay_option
@at_option
@click.option("--key", help="Names the task within its tag, until it is finished.")
@click.option(
    "--on-conflict",
    type=click.Choice(["reject", "keep", "replace"]),
    default="reject",
    show_default=True,
    help="While another task has the key: refuse, keep that task, or give it this body and time.",
)
@click.option(
    "--max-wait", metavar="DURATION", help="The longest time by which repeated replacing defers it."
)
@click.option("--queue", help="The queue, if not the processor's own.")
@click.option("--priority", type=int, default=0, help="0 to 9, higher first.")
@click.option("--retries", metavar="DELAYS", help='Its own retry schedule, such as "15s 3m 10m".')
@click.option(
    "--expires",
    metavar="DURATION",
    help="The latest start after the due time; then it is cancelled.",
)
@click.option(
    "--concurrency-key", metavar="KEY", help="The key for limits that are counted for each key."
)
@click.option(
    "--meta",
    type=PAIR,
    multiple=True,
    metavar="NAME=VALUE",
    help="A pair of the task's meta. Repeatable.",
)
@click.option(
    "--spread", metavar="DURATION", help="Due up to this time later, so that many are not together."
)
@click.option("--id", help="Your own id; scheduling again with it is harmless.")
@click.option(
    "--many",
    type=click.File("rb"),
    metavar="FILE",
    help="Schedule the tasks in FILE (- for stdin).",
)
@pass_cli
def schedule(
    cli: Cli,
    tag: str | None,
    body: str | None,
    delay: timedelta | None,
    at: datetime | None,
    many: BinaryIO | None,
    **options: Any,
) -> None:
    """Schedule a task of TAG. BODY is JSON, @FILE, or - for stdin; without it the body is null.

    \b
    delaytasks schedule order.close '{"order": 7}' --delay 30m
    delaytasks schedule report.send @report.json --at 2030-01-31T18:00:00Z --key january

    FILE for --many has one JSON object a line, with tag, body, delay or at, and further options of
    the task (key, queue, priority, retries, expires, max_wait, concurrency_key, meta, spread,
    id):

    \b
    {"tag": "order.close", "body": {"order": 7}, "delay": "30m"}
    """
    options["meta"] = pairs_or(options["meta"])
    if many is not None:
        shared = {name: options.pop(name) for name in ("on_conflict", "queue", "priority")}
        if any(given is not None for given in (tag, delay, at, *options.values())):
            raise click.UsageError(
                "With --many, only --queue, --priority and --on-conflict may be options; "
                "the file contains everything else."
            )
        _schedule_many(cli, many, **shared)
        return
    if tag is None:
        raise click.UsageError("Missing argument 'TAG'.")
    if (delay is None) == (at is None):
        raise click.UsageError("Give either --delay or --at.")
    if options["id"] is not None:
        options["id"] = check_id(options["id"])
    content = read_body(body)
    cli.import_processors()
    delays = cli.delays
    if delay is not None:
        task = delays.schedule_delay(tag, content, delay, **options)
    else:
        task = delays.schedule_at(tag, content, cast(datetime, at), **options)
    cli.answer_task(task, "scheduled")
    meant = runtime_of(delays).registry.meant_by(task.tag)
    if meant is not None:
        cli.note(
            f"No processor here has the tag {task.tag!r}; did you mean {meant!r}? "
            f"To cancel it: {cli.command} cancel {task.id}"
        )
    cli.note_broker_away()


def read_body(text: str | None) -> Any:
    if text is None:
        return None
    where = "the body"
    try:
        if text == "-":
            text, where = sys.stdin.read(), "stdin"
        elif text.startswith("@"):
            text, where = Path(text[1:]).read_text(encoding="utf-8"), text[1:]
    except (OSError, UnicodeDecodeError) as error:
        name = text[1:] or "stdin"
        raise click.BadParameter(f"cannot read {name}: {error}", param_hint="'BODY'") from None
    return _parse(text, f"{where} is not JSON", "a string needs quotes, as in '\"text\"'")


def _parse(text: str, what: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BodyNotJSONError(f"{what} ({error}); {remedy}") from None


# -- many -----------------------------------------------------------------------------------------


def _schedule_many(cli: Cli, file: BinaryIO, on_conflict: OnConflict, **defaults: Any) -> None:
    cli.import_processors()
    delays = cli.delays
    with moved_bar(cli, "scheduled") as progress:
        lines = _Lines(file, defaults, progress)
        try:
            delays.schedule_many(lines, on_conflict=on_conflict, on_batch=lines.written)
        except DelayTaskError as error:
            raise lines.located(error, delays, on_conflict) from error
    cli.answer({"scheduled": lines.scheduled}, f"scheduled {count(lines.scheduled, 'task')}")
    cli.note_broker_away()


class _Lines:
    """The tasks of a file.

    It counts the lines that were written, so that an error can name the line with which to go on.
    """

    def __init__(self, file: BinaryIO, defaults: dict[str, Any], progress: Progress) -> None:
        self._file = file
        self._defaults = {"body": None, **defaults}
        self._progress = progress
        self._bar = progress.add_task("", total=_size(file), moved=0)
        #: The tasks that are not written yet, each with its line.
        self._waiting: list[tuple[int, NewTask]] = []
        self._number = self.scheduled = 0
        self._is_batch_written = False

    def __iter__(self) -> Iterator[NewTask]:
        for raw in self._file:
            self._number += 1
            self._progress.advance(self._bar, len(raw))
            if self._is_batch_written:  # the batches are written before the next line is read
                self._waiting.clear()
                self._is_batch_written = False
            if raw.strip():
                try:
                    task = _task(raw, self._defaults)
                except InvalidInputError as error:
                    raise _at_line(self._number, error) from error
                self._waiting.append((self._number, task))
                yield task

    def written(self, tasks: Sequence[DelayTask]) -> None:
        self.scheduled += len(tasks)
        self._is_batch_written = True
        self._progress.update(self._bar, moved=self.scheduled)

    def located(
        self, error: DelayTaskError, delays: DelayTasks, on_conflict: OnConflict
    ) -> DelayTaskError:
        """Return the error with its line and the number of tasks that were written before it."""
        first = self._waiting[0][0] if self._waiting else self._number
        done = f"{count(self.scheduled, 'task')} scheduled, those before line {first}"
        if not isinstance(error, InvalidInputError):
            done += f", and perhaps some of lines {first} to {self._number}"
        else:
            if not str(error).startswith("line "):
                # The producer checks a whole batch before it writes: find the wrong task.
                for number, new in self._waiting:
                    try:
                        runtime_of(delays).producer.build([new], on_conflict)
                    except InvalidInputError:
                        _at_line(number, error)
                        break
            done = done if self.scheduled else "nothing was scheduled"
        error.args = (f"{error}; {done}",)
        return error


def _task(raw: bytes, defaults: dict[str, Any]) -> NewTask:
    """Return the task of one line."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BodyNotJSONError(f"the line is not UTF-8 ({error}); write JSON as UTF-8") from None
    values = _parse(text, "the line is not JSON", "write one object a line")
    if not isinstance(values, dict) or "tag" not in values:
        raise InvalidScheduleError(
            'not an object with a tag, as {"tag": "order.close", "delay": "30m"} is one'
        )
    for name in values:
        if name not in _LINE_FIELDS:
            close = difflib.get_close_matches(name, _LINE_FIELDS, n=1)
            known = f" (known: {', '.join(_LINE_FIELDS)})"
            hint = f"; did you mean {close[0]!r}?" if close else known
            raise InvalidScheduleError(f"a task has no field {name!r:.60}{hint}")
    delay, at = values.get("delay"), values.pop("at", None)
    if isinstance(delay, str):
        values["delay"] = parse_duration(delay)
    if at is not None and not isinstance(at, str):
        raise InvalidScheduleError(f"at is an instant in quotes, not {at!r:.40}")
    instant = None if at is None else parse_instant(at)
    return NewTask(**{**defaults, **values, "at": instant})


def _at_line(number: int, error: DelayTaskError) -> DelayTaskError:
    error.args = (f"line {number}: {error}",)
    return error


def _size(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None
