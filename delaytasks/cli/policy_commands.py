"""`delaytasks pause`, `resume` and `policy`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.output import (
    NOTHING,
    Cell,
    Parsed,
    actor_option,
    cell,
    count,
    parse_instant,
    print_json,
    print_table,
    say,
    show_instant,
)
from delaytasks.core.errors import InvalidInputError
from delaytasks.core.inputs import parse_duration
from delaytasks.core.policies import Policy

#: Removes a limit.
NONE = "none"
#: The default number of policies on a page.
PAGE = 100


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    queue = click.option("--queue", help="The queue, for all tags.")
    tag = click.option("--tag", help="The tag, in all queues.")
    return tag(queue(actor_option(function)))


def _end(text: str, option: str) -> datetime | timedelta:
    try:
        return parse_duration(text, option)
    except InvalidInputError:
        return parse_instant(text, option)


@click.command(cls=Command)
@_target
@click.option(
    "--until", type=Parsed("time", _end), help="The end: 2h (from now), or 2030-01-31T18:00:00Z."
)
@pass_cli
def pause(cli: Cli, **target: Any) -> None:
    """Pause a tag or a queue: no more of its tasks begin. Running tasks may finish.

    Waiting tasks become HELD, step by step with each sweep.

    \b
    delaytasks pause --tag mail.send
    delaytasks pause --tag partner.call --until 2h
    delaytasks pause --queue reports --actor "ann, since the printer burns"
    """
    _report(cli, cli.delays.policies.pause(**target))


@click.command(cls=Command)
@_target
@pass_cli
def resume(cli: Cli, **target: str | None) -> None:
    """Resume a tag or a queue: its held tasks wait again, in the order of their due times.

    \b
    delaytasks resume --tag mail.send
    """
    _report(cli, cli.delays.policies.resume(**target))


@click.group(cls=Group)
def policy() -> None:
    """Pauses and limits.

    \b
    delaytasks policy list
    """


@policy.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=PAGE,
    show_default=True,
    help="Policies on a page.",
)
@click.option("--page", type=click.IntRange(1), default=1, show_default=True, help="The page.")
@pass_cli
def list_(cli: Cli, limit: int, page: int) -> None:
    """List the paused or limited tags and queues, with the number of held and running tasks.

    \b
    delaytasks policy list
    delaytasks policy list --limit 1000 --page 2
    """
    known = cli.delays.policies.list()
    found = known[(page - 1) * limit : page * limit]
    next_page = page + 1 if page * limit < len(known) else None
    if cli.is_json:
        policies = [each.as_json() for each in found]
        print_json({"policies": policies, "total": len(known), "next_page": next_page})
        return
    if not known:
        cli.note("No policies: nothing is paused, nothing is limited.")
        return
    if not found:
        cli.note(f"There is no page {page}: {count(len(known), 'policy', 'policies')} in all.")
        return
    print_table(
        "kind,name,paused,held,running,at once,each key,rate,since,actor".split(","),
        [_row(each) for each in found],
        folded="name actor",
        extra="since",
    )
    if next_page is not None:
        cli.note(f"{len(found):,} of {len(known):,} policies; the next ones: --page {next_page}")


@policy.command("set")
@click.option("--tag", required=True, help="The tag.")
@click.option(
    "--concurrency", metavar="N", help="The most tasks that run simultaneously, on all workers."
)
@click.option("--concurrency-per-key", metavar="N", help="The most running tasks of a limit key.")
@click.option(
    "--rate", metavar="RATE", help="The most tasks that begin in a period: 100/s, 30/m, 1000/1h30m."
)
@actor_option
@pass_cli
def set_(cli: Cli, tag: str, actor: str | None, **limits: str | None) -> None:
    """Limit a tag. Limits that are not named stay; "none" removes a limit.

    \b
    delaytasks policy set --tag mail.send --concurrency 10 --rate 100/s
    delaytasks policy set --tag mail.send --rate none
    """
    given: dict[str, Any] = {
        name: None if text == NONE else text if name == "rate" else _number(name, text)
        for name, text in limits.items()
        if text is not None
    }
    _report(cli, cli.delays.policies.set(tag=tag, **given, actor=actor))


@policy.command()
@_target
@pass_cli
def clear(cli: Cli, **target: str | None) -> None:
    """Remove the pause and the limits of a tag or a queue.

    \b
    delaytasks policy clear --tag mail.send
    """
    _report(cli, cli.delays.policies.remove(**target))


# -- internals ------------------------------------------------------------------------------------


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InvalidInputError(f'{name} is a number, or "{NONE}", not {text!r:.40}', name)
    return int(text)


def _report(cli: Cli, changed: Policy) -> None:
    """Print the policy as it is now, and the number of tasks that it holds."""
    known = cli.delays.policies.list(**{changed.kind: changed.name})
    policy = known[0] if known else changed
    if cli.is_json:
        print_json(policy.as_json())
        return
    paused = f"paused {_end_of(policy)}".strip()
    state, more = (paused, "and more") if policy.is_paused else ("not paused", "fewer")
    held = f"held: {count(policy.held or 0, 'task')}"
    if _is_unapplied(policy):
        held += f", {more} with each sweep"
    say(f"{policy.kind} {cell(policy.name)} is {state}; {held}")
    if policy.has_limits:
        say(f"limits: {_limits(policy)}; running: {count(policy.running or 0, 'task')}")


def _end_of(policy: Policy) -> str:
    """Return when the pause ends, or an empty text."""
    return "" if policy.paused_until is None else f"until {show_instant(policy.paused_until)}"


def _is_unapplied(policy: Policy) -> bool:
    """Return whether sweeps still hold or release tasks. Tasks in a waitlist do not count."""
    is_limit_only = policy.has_limits and not policy.is_paused
    return not (policy.is_applied or policy.version == 0 or is_limit_only)


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
