"""`delaytasks pause`, `resume` and `limit`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import (
    NOTHING,
    Cell,
    Parsed,
    actor_option,
    cell,
    count,
    print_json,
    print_table,
    show_instant,
)
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import has_unit, parse_duration, parse_instant
from delaytasks.model.policies import Policy

#: Removes a limit.
NONE = "none"
_recurring = click.option(
    "--recurring", metavar="NAME", help="The recurring schedule, instead of a tag or a queue."
)


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    queue = click.option("--queue", help="The queue, for all tags.")
    tag = click.option("--tag", help="The tag, in all queues.")
    return tag(queue(actor_option(function)))


def _end(text: str, option: str) -> datetime | timedelta:
    rule = "write 2h (from now) or 2030-01-31T18:00:00Z"
    if not has_unit(text):
        raise InvalidInputError(f"{text!r:.40} has no unit; {rule}", option)
    try:
        return parse_duration(text, option)
    except InvalidInputError:
        return parse_instant(text, option)


@click.command(cls=Command)
@_target
@_recurring
@click.option("--until", type=Parsed("time", _end), help="The end, as 2h or 2030-01-31T18:00:00Z.")
@pass_cli
def pause(cli: Cli, recurring: str | None, until: Any, actor: str | None, **target: Any) -> None:
    """Pause a tag, a queue or a recurring schedule: no more of its tasks begin.

    \b
    delaytasks pause --tag mail.send
    delaytasks pause --tag partner.call --until 2h
    delaytasks pause --queue reports --actor "ann, since the printer burns"
    delaytasks pause --recurring nightly

    Running tasks may finish. The waiting tasks of a tag or a queue become HELD, step by step with
    each sweep. Those of a recurring schedule are cancelled if their occurrences are later.
    """
    if recurring is not None:
        _refuse({**target, "until": until}, "--recurring")
        cli.answer_schedule(cli.delays.recurring.pause(recurring, actor=actor), "paused")
        return
    _report(cli, cli.delays.policies.pause(**target, until=until, actor=actor))


@click.command(cls=Command)
@_target
@_recurring
@pass_cli
def resume(cli: Cli, recurring: str | None, actor: str | None, **target: str | None) -> None:
    """Resume a tag, a queue or a recurring schedule.

    \b
    delaytasks resume --tag mail.send
    delaytasks resume --recurring nightly

    Held tasks wait again, in the order of their due times. A recurring schedule continues with its
    next occurrence.
    """
    if recurring is not None:
        _refuse(target, "--recurring")
        cli.answer_schedule(cli.delays.recurring.resume(recurring, actor=actor), "resumed")
        return
    _report(cli, cli.delays.policies.resume(**target, actor=actor))


@click.command(cls=Command)
@_target
@click.option("--concurrency", metavar="N", help="The most running tasks, on all workers.")
@click.option("--concurrency-per-key", metavar="N", help="The most running tasks of a limit key.")
@click.option("--rate", help="The most tasks that begin in a period: 100/s, 30/m, 1000/1h30m.")
@click.option("--remove", is_flag=True, help="Remove all limits, and the pause.")
@pass_cli
def limit(
    cli: Cli, tag: str | None, queue: str | None, actor: str | None, remove: bool, **limits: Any
) -> None:
    """Limit a tag, or show what is limited or paused, with its held and running tasks.

    \b
    delaytasks limit
    delaytasks limit --tag mail.send --concurrency 10 --rate 100/s
    delaytasks limit --tag mail.send --rate none
    delaytasks limit --tag mail.send --remove

    Limits that are not named stay; "none" removes a limit.
    """
    given: dict[str, Any] = {
        name: None if text == NONE else text if name == "rate" else _number(name, text)
        for name, text in limits.items()
        if text is not None
    }
    if remove:
        _refuse(given, "--remove")
        _report(cli, cli.delays.policies.remove(tag=tag, queue=queue, actor=actor))
    elif given:
        if tag is None or queue is not None:
            raise click.UsageError("a limit is for a tag: use --tag; a queue can only be paused")
        _report(cli, cli.delays.policies.set(tag=tag, **given, actor=actor))
    else:
        _list(cli, cli.delays.policies.list(tag=tag, queue=queue))


# -- internals ------------------------------------------------------------------------------------


def _refuse(given: dict[str, Any], option: str) -> None:
    """Raise a usage error if an option is given that does not belong to `option`."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} cannot be combined with {option}")


def _list(cli: Cli, found: list[Policy]) -> None:
    if cli.is_json:
        print_json([each.as_json() for each in found])
    elif found:
        print_table(
            "kind,name,paused,held,running,at once,each key,rate,since,actor".split(","),
            [_row(each) for each in found],
            folded="name actor",
            extra="since",
        )
    else:
        cli.note("Nothing is paused, nothing is limited.")


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InvalidInputError(f'{name} is a number, or "{NONE}", not {text!r:.40}', name)
    return int(text)


def _report(cli: Cli, changed: Policy) -> None:
    """Print the policy as it is now, and the number of tasks that it holds."""
    known = cli.delays.policies.list(**{changed.kind: changed.name})
    policy = known[0] if known else changed
    paused = f"paused {_end_of(policy) or 'until resumed'}"
    state = paused if policy.is_paused else "not paused"
    text = f"{policy.kind} {cell(policy.name)} is {state}"
    if policy.held is not None:
        text += f"; held: {count(policy.held, 'task')}"
    if policy.has_limits:
        text += f"\nlimits: {_limits(policy)}; running: {count(policy.running or 0, 'task')}"
    cli.answer(policy.as_json(), text)


def _end_of(policy: Policy) -> str:
    """Return when the pause ends, or an empty text."""
    return "" if policy.paused_until is None else f"until {show_instant(policy.paused_until)}"


def _limits(policy: Policy) -> str:
    limits = {
        "at once": policy.concurrency,
        "at once of each key": policy.concurrency_per_key,
        "begin": policy.rate_text,
    }
    return ", ".join(f"{value} {name}" for name, value in limits.items() if value is not None)


def _row(policy: Policy) -> list[Cell]:
    return [
        policy.kind,
        policy.name,
        (_end_of(policy) or "yes", "yellow") if policy.is_paused else NOTHING,
        policy.held or 0,
        policy.running or 0,
        policy.concurrency,
        policy.concurrency_per_key,
        policy.rate_text,
        policy.update_time,
        policy.updated_by,
    ]
