"""Makes whole commands from the table of operations: their options and their output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import Made, Part, Table, cell, coloured, sentence
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import LogEntry
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask
from delaytasks.operate.operations import (
    BODY,
    FLAG,
    OPERATIONS,
    PAIR,
    PAIRS,
    Kind,
    Operation,
    Parameter,
    document_of,
)
from delaytasks.operate.texts import parse_past, show_instant
from delaytasks.recurring.definition import RecurringSchedule

# -- options --------------------------------------------------------------------------------------


class Typed(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions
    """The type of an option. Errors in its values name the option."""

    def __init__(self, kind: Kind) -> None:
        self.name = kind.name
        self._parse = kind.parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = (param and param.name) or "value"
        return self._parse(value, name) if isinstance(value, str) else value


def _parse_past(typed: str, argument: str) -> datetime:
    now: datetime = click.get_current_context().obj.runtime.clock.now()
    return parse_past(typed, now, argument)


def _parse_range(typed: str, argument: str) -> tuple[datetime | None, datetime | None]:
    """Return a range of instants, each of which may be left out."""
    since, dots, until = typed.partition("..")
    if not dots or not (since or until):
        raise InvalidInputError(
            f"{typed!r:.40} is no range; write it as 2h..1h, or 1h.. without an end", argument
        )
    return (
        _parse_past(since, argument) if since else None,
        _parse_past(until, argument) if until else None,
    )


PAST = Kind("time", parse=_parse_past)
RANGE = Kind("A..B", parse=_parse_range)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_of(parameter: Parameter) -> click.Parameter:
    """Return the option of a parameter, or an argument for a required one and for the body."""
    kind, name = parameter.kind, parameter.name
    if parameter.is_required or parameter is BODY:
        return click.Argument([name], required=parameter.is_required)
    if kind is FLAG:
        return click.Option([flag_of(name)], is_flag=True, help=parameter.help)
    words, is_many = parameter.choices, parameter.is_many or kind is PAIRS
    type_ = click.Choice(words, case_sensitive=False) if words else Typed(kind)
    return click.Option([flag_of(name)], type=type_, multiple=is_many, help=parameter.help)


def given_of(parameters: Iterable[Parameter], options: dict[str, Any]) -> dict[str, Any]:
    """Take the values of these parameters out of `options`; return those that were given."""
    found = {each: options.pop(each.name) for each in parameters}
    return {
        each.name: dict(value) if each.kind in (PAIR, PAIRS) else value
        for each, value in found.items()
        if value is not None and value is not False and value != ()
    }


# -- commands -------------------------------------------------------------------------------------


def perform(cli: Cli, operation: Operation, given: dict[str, Any]) -> None:
    """Perform an operation, and print what it has returned."""
    if BODY in operation.parameters:
        given["body"] = read_body(given.get("body"))
        cli.import_processors()  # the processor names the queue
    result = operation.call(cli.delays, **given)
    cli.answer(document_of(result), *_parts(result, operation.done, cli.runtime.clock.now()))
    match result:
        case []:
            cli.note(_EMPTY[operation.name])
        case RecurringSchedule(is_declared=True) if operation.done == "removed":
            cli.note("Workers whose code declares it add it again. To stop it, pause it.")


@cache
def command_of(
    name: str, act: Callable[..., None] = perform, more: tuple[click.Parameter, ...] = ()
) -> Command:
    """Return the command of an operation.

    Parameters
    ----------
    act
        Is called with the `Cli`, the operation, the given values of its parameters, and the values
        of `more`.
    more
        Options and arguments that only the command line has.
    """
    operation = OPERATIONS[name]
    parameters = [*operation.parameters, *operation.only_bulk]

    @pass_cli
    def callback(cli: Cli, **options: Any) -> None:
        given = given_of(parameters, options)
        act(cli, operation, given, **options)

    options = [*more, *map(option_of, parameters)]
    return Command(name.split()[-1], callback=callback, params=options, help=operation.help)


def read_body(typed: str | None) -> Any:
    """Return the body that a person typed: JSON, or - for stdin."""
    if typed is None:
        return None
    return BODY.kind.parse(sys.stdin.buffer.read() if typed == "-" else typed, BODY.name)


# -- what they print ------------------------------------------------------------------------------


#: The note after an operation that lists nothing.
_EMPTY = {"limit": "Nothing is paused, nothing is limited.", "log": "No operations yet."}


_POLICY = (
    "kind,name,paused=is_paused,until=paused_until,held,running,at once=concurrency,"
    "each key=concurrency_per_key,rate=rate_text,since=update_time,actor=updated_by"
)
_ENTRY = "id,started=started_at,actor,action,filter,state,seen=seen_at,matched,changed,refused"


def _parts(result: Any, done: str, now: datetime) -> list[Part]:
    match result:
        case [Policy(), *_]:
            return [Table.of(_POLICY, result, folded="name,actor", extra="since")]
        case [LogEntry(), *_]:
            made: Made = {
                "id": lambda entry: str(entry.id),
                "state": lambda entry: coloured(entry.state),
            }
            return [Table.of(_ENTRY, result, made, folded="actor,filter", extra="seen")]
        case Policy():
            is_known = result.is_paused or result.has_limits
            table = _parts([result], done, now) if is_known else []
            return [f"{done} {result.kind} {cell(result.name)}", *table]
        case RecurringSchedule():
            at = None if done == "removed" else result.next_at
            following = "" if at is None else f"; next occurrence {show_instant(at)}"
            name, tag = cell(result.name), cell(result.tag)
            return [f"{done} recurring schedule {name} ({tag}){following}"]
        case DelayedTask():
            return [sentence(result, done, now)]
    return []
