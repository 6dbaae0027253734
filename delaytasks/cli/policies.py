"""`pause`, `resume`, and `policy`: list, set and clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import NOTHING, Cell, cell, count, print_json, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.core.errors import InvalidPolicyError
from delaytasks.core.policies import Policy

#: Takes a limit away.
NONE = "none"
#: Policies that one call lists unless it is told otherwise.
PAGE = 100


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    actor = click.option("--actor", metavar="NAME", help="Who does it, if not you on this host.")
    queue = click.option("--queue", help="The queue, whatever the tags of its tasks.")
    tag = click.option("--tag", help="The tag, whatever the queues of its tasks.")
    return tag(queue(actor(function)))


@click.command(epilog=EXIT_CODES)
@_target
@pass_cli
def pause(cli: Cli, tag: str | None, queue: str | None, actor: str | None) -> None:
    """Pause a tag or a queue: nothing more of it begins; what runs may finish.

    Tasks that wait become HELD, step by step with each sweep.

    \b
    delaytasks pause --tag mail.send
    delaytasks pause --queue reports --actor "ann, since the printer burns"
    """
    _tell(cli, cli.delays.pause(tag=tag, queue=queue, actor=actor))


@click.command(epilog=EXIT_CODES)
@_target
@pass_cli
def resume(cli: Cli, tag: str | None, queue: str | None, actor: str | None) -> None:
    """Resume a tag or a queue: what is held waits again, in the order of its due times.

    \b
    delaytasks resume --tag mail.send
    """
    _tell(cli, cli.delays.resume(tag=tag, queue=queue, actor=actor))


@click.group(epilog=EXIT_CODES)
def policy() -> None:
    """What is paused, and what limits there are.

    \b
    delaytasks policy list
    """


@policy.command("list", epilog=EXIT_CODES)
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
    """List the tags and queues that are paused or limited, and how many of their tasks are held and run.

    \b
    delaytasks policy list
    delaytasks policy list --limit 1000 --page 2
    """
    known = cli.delays.policies()
    found = known[(page - 1) * limit : page * limit]
    has_more = page * limit < len(known)
    if cli.is_json:
        policies = [each.as_json() for each in found]
        print_json(
            {"policies": policies, "total": len(known), "next_page": page + 1 if has_more else None}
        )
        return
    if not known:
        cli.note("No policies: nothing is paused, nothing is limited.")
        return
    if not found:
        cli.note(f"There is no page {page}: {count(len(known), 'policy', 'policies')} in all.")
        return
    headings = (
        "kind",
        "name",
        "paused",
        "held",
        "running",
        "at once",
        "each key",
        "rate",
        "since",
        "actor",
    )
    print_table(
        headings, map(_row, found), right="held running", folded="name actor", extra="since"
    )
    for each in found:
        _note_missing(cli, each)
    if has_more:
        cli.note(f"{len(found):,} of {len(known):,} policies; the next ones: --page {page + 1}")


@policy.command("set", epilog=EXIT_CODES)
@click.option("--tag", required=True, help="The tag.")
@click.option(
    "--concurrency", metavar="N", help="So many of its tasks run at once, of all workers together."
)
@click.option("--key-concurrency", metavar="N", help="So many of each concurrency key.")
@click.option("--rate", metavar="RATE", help="So many begin in a period: 100/s, 30/m, 1000/1h30m.")
@click.option("--actor", metavar="NAME", help="Who does it, if not you on this host.")
@pass_cli
def set_(cli: Cli, tag: str, actor: str | None, **limits: str | None) -> None:
    """Limit a tag. What is not mentioned stays; "none" takes a limit away.

    \b
    delaytasks policy set --tag mail.send --concurrency 10 --rate 100/s
    delaytasks policy set --tag mail.send --rate none
    """
    given: dict[str, Any] = {
        name: None if text == NONE else text if name == "rate" else _number(name, text)
        for name, text in limits.items()
        if text is not None
    }
    _tell(cli, cli.delays.set_policy(tag, **given, actor=actor))


@policy.command(epilog=EXIT_CODES)
@_target
@pass_cli
def clear(cli: Cli, tag: str | None, queue: str | None, actor: str | None) -> None:
    """Neither pause nor limit a tag or a queue any more.

    \b
    delaytasks policy clear --tag mail.send
    """
    _tell(cli, cli.delays.clear_policy(tag=tag, queue=queue, actor=actor))


# -- inside ---------------------------------------------------------------------------------------


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InvalidPolicyError(f'{name} is a number, or "{NONE}", not {text!r:.40}')
    return int(text)


def _tell(cli: Cli, changed: Policy) -> None:
    """What holds now, and how many tasks it holds so far."""
    is_tag = changed.kind == "tag"
    known = cli.delays.policies(
        tag=changed.name if is_tag else None, queue=None if is_tag else changed.name
    )
    now = known[0] if known else changed
    if cli.is_json:
        print_json(now.as_json())
        return
    what = f"{now.kind} {cell(now.name)}"
    if now.is_paused:
        say(
            f"{what} is paused; held: {count(now.held or 0, 'task')}{_rest(now, ', and more with each sweep')}"
        )
    else:
        say(
            f"{what} is not paused; held: {count(now.held or 0, 'task')}{_rest(now, ', fewer with each sweep')}"
        )
    if now.has_limits:
        say(f"limits: {_limits(now)}; running: {count(now.running or 0, 'task')}")
    _note_missing(cli, now)


def _rest(policy: Policy, goes_on: str) -> str:
    """Those who wait in line for a limited tag are no business of the sweep."""
    is_all = (
        policy.is_applied or policy.version == 0 or (policy.has_limits and not policy.is_paused)
    )
    return "" if is_all else goes_on


def _limits(policy: Policy) -> str:
    said = {
        "at once": policy.concurrency,
        "at once of each key": policy.key_concurrency,
        "begin": policy.rate_text,
    }
    return ", ".join(f"{value} {name}" for name, value in said.items() if value is not None)


def _note_missing(cli: Cli, policy: Policy) -> None:
    if policy.missing:
        where = ", ".join(f"shard {number}" for number in policy.missing)
        cli.note(f"Not known, or not so, in {where}: do it again when all databases are back.")


def _row(policy: Policy) -> list[Cell]:
    return [
        policy.kind,
        cell(policy.name),
        ("yes", "yellow") if policy.is_paused else NOTHING,
        f"{policy.held or 0:,}",
        f"{policy.running or 0:,}",
        cell(policy.concurrency),
        cell(policy.key_concurrency),
        cell(policy.rate_text),
        show_instant(policy.update_time) if policy.update_time else NOTHING,
        cell(policy.updated_by),
    ]
