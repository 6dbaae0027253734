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

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import count, print_json, say, sentence, task_json
from delaytasks.cli.progress import progress_bar
from delaytasks.cli.times import at_option, delay_option, parse_instant
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import (
    BodyNotJSONError,
    DelayTaskError,
    InvalidInputError,
    InvalidScheduleError,
)
from delaytasks.core.ids import check_id
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.new_task import NewTask
from delaytasks.core.task import DelayTask

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.app import DelayTasks

_LINE_FIELDS = ["at", *(name for name in NewTask._fields if name != "when")]


@click.command(epilog=EXIT_CODES)
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
    help="While another task has the key: refuse, leave that one, or give it the new body and time.",
)
@click.option(
    "--max-wait",
    metavar="DURATION",
    help="Replacing it again and again puts it off no longer than so.",
)
@click.option("--queue", help="The queue, if not the processor's own.")
@click.option("--priority", type=int, default=0, help="0 to 9, higher first.")
@click.option(
    "--retry", metavar="DELAYS", help='A retry schedule of its own, for example "15s 3m 10m".'
)
@click.option(
    "--expires", metavar="DURATION", help="How late it may begin; past that it is cancelled."
)
@click.option(
    "--concurrency-key", metavar="KEY", help="Whom it is for, where limits are counted for each."
)
@click.option("--id", "id_", help="An id of your own; scheduling again with it is harmless.")
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
    when: datetime | None,
    key: str | None,
    on_conflict: str,
    max_wait: str | None,
    queue: str | None,
    priority: int,
    retry: str | None,
    expires: str | None,
    concurrency_key: str | None,
    id_: str | None,
    many: BinaryIO | None,
) -> None:
    """Schedule a task of TAG. BODY is JSON, @FILE, or - for stdin; without it the body is null.

    \b
    delaytasks schedule order.close '{"order": 7}' --delay 30m
    delaytasks schedule report.send @report.json --at 2030-01-31T18:00:00Z --key january

    FILE for --many has one JSON object a line, with tag, body, delay or at, and what else a task needs (key, queue,
    priority, retry, expires, max_wait, concurrency_key, id):

    \b
    {"tag": "order.close", "body": {"order": 7}, "delay": "30m"}
    """
    conflict = cast(OnConflict, on_conflict)
    if many is not None:
        if any(
            given is not None
            for given in (tag, delay, when, key, max_wait, retry, expires, concurrency_key, id_)
        ):
            raise click.UsageError(
                "--many takes all but --queue, --priority and --on-conflict from its file"
            )
        _schedule_many(cli, many, conflict, queue, priority)
        return
    if tag is None:
        raise click.UsageError("Missing argument 'TAG'.")
    if (delay is None) == (when is None):
        raise click.UsageError("Give --delay or --at, one of the two.")
    id = None if id_ is None else check_id(id_)
    content = _body(body)
    cli.import_processors()
    delays = cli.delays
    options: dict[str, Any] = {
        "key": key,
        "on_conflict": conflict,
        "queue": queue,
        "priority": priority,
        "id": id,
    }
    options |= {
        "max_wait": max_wait,
        "retry": retry,
        "expires": expires,
        "concurrency_key": concurrency_key,
    }
    if when is None:
        assert delay is not None
        task = delays.schedule_delay(tag, content, delay, **options)
    else:
        task = delays.schedule_at(tag, content, when, **options)
    if cli.is_json:
        print_json(task_json(task))
        return
    say(sentence(task, "scheduled", delays.clock.now()))
    meant = delays.registry.meant_by(task.tag)
    if meant is not None:
        back = f"{cli.command} cancel {task.id}"
        cli.note(
            f"No processor here has the tag {task.tag!r}; did you mean {meant!r}? To take it back: {back}"
        )
    cli.note_broker_away()


def _body(text: str | None) -> Any:
    if text is None:
        return None
    where = "the body"
    try:
        if text == "-":
            text, where = sys.stdin.read(), "stdin"
        elif text.startswith("@"):
            text, where = Path(text[1:]).read_text(encoding="utf-8"), text[1:]
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f"can not read {text[1:] or 'stdin'}: {error}", param_hint="'BODY'"
        ) from None
    return _parse(text, f"{where} is not JSON", "a string needs quotes, as in '\"text\"'")


def _parse(text: str, what: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BodyNotJSONError(f"{what} ({error}); {remedy}") from None


# -- many -----------------------------------------------------------------------------------------


class _Lines:
    """The tasks of a file, and which of its lines were written, so that an error can say where to go on."""

    def __init__(
        self,
        file: BinaryIO,
        on_conflict: OnConflict,
        queue: str | None,
        priority: int,
        progress: Progress,
    ) -> None:
        self._file = file
        self.on_conflict = on_conflict
        self._queue = queue
        self._priority = priority
        self._progress = progress
        self._bar = progress.add_task("", total=_size(file), moved=0)
        #: The tasks that are not written yet, each with its line.
        self.waiting: list[tuple[int, NewTask]] = []
        self.number = self.scheduled = 0
        self._is_lot_written = False

    def __iter__(self) -> Iterator[NewTask]:
        for raw in self._file:
            self.number += 1
            self._progress.advance(self._bar, len(raw))
            if self._is_lot_written:  # as a whole: else nobody would ask for more
                self.waiting.clear()
                self._is_lot_written = False
            if raw.strip():
                try:
                    task = self._task(raw)
                except InvalidInputError as error:
                    raise _at_line(self.number, error) from error
                self.waiting.append((self.number, task))
                yield task

    def written(self, tasks: Sequence[DelayTask]) -> None:
        self.scheduled += len(tasks)
        self._is_lot_written = True
        self._progress.update(self._bar, moved=self.scheduled)

    def _task(self, raw: bytes) -> NewTask:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BodyNotJSONError(
                f"the line is not UTF-8 ({error}); write JSON as UTF-8"
            ) from None
        values = _parse(text, "the line is not JSON", "write one object a line")
        if not isinstance(values, dict) or "tag" not in values:
            raise InvalidScheduleError(
                'not an object with a tag, as {"tag": "order.close", "delay": "30m"} is one'
            )
        for name in values:
            if name not in _LINE_FIELDS:
                close = difflib.get_close_matches(name, _LINE_FIELDS, n=1)
                hint = (
                    f"; did you mean {close[0]!r}?"
                    if close
                    else f" (known: {', '.join(_LINE_FIELDS)})"
                )
                raise InvalidScheduleError(f"a task has no field {name!r:.60}{hint}")
        delay, at = values.get("delay"), values.pop("at", None)
        if isinstance(delay, str):
            values["delay"] = parse_duration(delay)
        if at is not None and not isinstance(at, str):
            raise InvalidScheduleError(f"at is an instant in quotes, not {at!r:.40}")
        when = None if at is None else parse_instant(at)
        defaults = {"body": None, "queue": self._queue, "priority": self._priority}
        return NewTask(**{**defaults, **values, "when": when})


def _schedule_many(
    cli: Cli, file: BinaryIO, on_conflict: OnConflict, queue: str | None, priority: int
) -> None:
    cli.import_processors()
    delays = cli.delays
    with progress_bar(cli, "scheduled") as progress:
        lines = _Lines(file, on_conflict, queue, priority, progress)
        try:
            delays.schedule_many(lines, on_conflict=on_conflict, on_batch=lines.written)
        except DelayTaskError as error:
            raise _located(error, lines, delays) from error
    if cli.is_json:
        print_json({"scheduled": lines.scheduled})
        return
    say(f"scheduled {count(lines.scheduled, 'task')}")
    cli.note_broker_away()


def _at_line(number: int, error: DelayTaskError) -> DelayTaskError:
    error.args = (f"line {number}: {error}",)
    return error


def _located(error: DelayTaskError, lines: _Lines, delays: DelayTasks) -> DelayTaskError:
    """The same error, with its line and with what is done: tasks are written a few thousand at a time."""
    first = lines.waiting[0][0] if lines.waiting else lines.number
    done = f"{count(lines.scheduled, 'task')} scheduled, those before line {first}"
    if not isinstance(error, InvalidInputError):
        error.args = (f"{error}; {done}, and perhaps some of lines {first} to {lines.number}",)
        return error
    if not str(error).startswith("line "):
        # Found when the lot was checked, before any of it was written: which one was it?
        for number, new in lines.waiting:
            try:
                delays.producer.build([new], lines.on_conflict)
            except InvalidInputError:
                _at_line(number, error)
                break
    error.args = (f"{error}; {done if lines.scheduled else 'nothing was scheduled'}",)
    return error


def _size(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None
