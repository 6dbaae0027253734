"""Makes the options of commands, and whole commands, from the table of operations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.results import answer_result
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import parse_duration
from delaytasks.operate.operations import (
    BODY,
    FLAG,
    OPERATIONS,
    PAIR,
    PAIRS,
    Kind,
    Operation,
    Parameter,
)
from delaytasks.operate.texts import parse_past


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions
    """A type of option that one function parses. Its errors name the option."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = (param and param.name) or "value"
        return self._parse(value, name) if isinstance(value, str) else value


def _parse_past(typed: str, argument: str) -> datetime:
    now: datetime = click.get_current_context().obj.runtime.clock.now()
    return parse_past(typed, now, argument)


def parse_range(typed: str, argument: str) -> tuple[datetime | None, datetime | None]:
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


DURATION = Parsed("duration", parse_duration)
PAST = Parsed("time", _parse_past)
RANGE = Parsed("A..B", parse_range)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_of(parameter: Parameter) -> click.Parameter:
    """Return the option of a parameter. Those that are required, and the body, are arguments."""
    kind, name = parameter.kind, parameter.name
    if parameter.is_required or parameter is BODY:
        return click.Argument([name], required=parameter.is_required)
    if kind is FLAG:
        return click.Option([flag_of(name)], is_flag=True, help=parameter.help)
    is_many = parameter.is_many or kind is PAIRS
    return click.Option([flag_of(name)], type=_type_of(kind), multiple=is_many, help=parameter.help)


def _type_of(kind: Kind) -> Any:
    if "enum" in kind.schema:
        return click.Choice(kind.schema["enum"], case_sensitive=False)
    return Parsed(kind.name, kind.parse)


def given_of(parameters: Iterable[Parameter], options: dict[str, Any]) -> dict[str, Any]:
    """Take the values of these parameters out of `options`; return those that were given."""
    found = {each: options.pop(each.name) for each in parameters}
    return {
        each.name: dict(value) if each.kind in (PAIR, PAIRS) else value
        for each, value in found.items()
        if value is not None and value is not False and value != ()
    }


def perform(cli: Cli, operation: Operation, given: dict[str, Any]) -> None:
    """Perform an operation, and print its result."""
    if BODY in operation.parameters:
        given["body"] = read_body(given.get("body"))
        cli.import_processors()  # the processor names the queue
    answer_result(cli, operation, operation.call(cli.delays, **given))


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
    """Return the body that a person typed: JSON, the name of a file, or - for stdin."""
    if typed is None:
        return None
    where = "the body"
    try:
        if typed == "-":
            typed, where = sys.stdin.read(), "stdin"
        elif typed.startswith("@"):
            typed, where = Path(typed[1:]).read_text(encoding="utf-8"), typed[1:]
    except (OSError, UnicodeDecodeError) as error:
        name = typed[1:] or "stdin"
        raise click.BadParameter(f"cannot read {name}: {error}", param_hint="'BODY'") from None
    return parse_body(typed, f"{where} is not JSON", "a string needs quotes, as in '\"text\"'")


def parse_body(typed: str, what: str, remedy: str) -> Any:
    try:
        return json.loads(typed)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} ({error}); {remedy}", "body") from None
