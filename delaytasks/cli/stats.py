"""`stats`: the state of this deployment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.hints import Hints
from delaytasks.cli.output import (
    BAD,
    GOOD,
    NOTHING,
    Cell,
    cell,
    coloured,
    print_fields,
    print_json,
    print_table,
    say,
)
from delaytasks.cli.stats_document import gather
from delaytasks.cli.waiting import print_late
from delaytasks.core.inputs import show_duration
from delaytasks.core.states import Status
from delaytasks.statistics.reading import WINDOWS

LEVEL_STYLES = {"good": {"fg": GOOD}, "note": {}, "warning": {"fg": "yellow"}, "bad": {"fg": BAD}}
#: Paused tags and queues in one line of text.
NAMED = 10


@click.command(cls=Command)
@pass_cli
def stats(cli: Cli) -> None:
    """Print counts, late tasks, workers and sweeps.

    \b
    delaytasks stats
    """
    found = gather(cli)
    if cli.is_json:
        print_json(found)
    else:
        _print(found, cli.hints)
    if found["database"]["error"]:
        sys.exit(1)


def _print(found: dict[str, Any], hints: Hints) -> None:
    about = dict.fromkeys(found["estimated"], "about ")
    print_table(
        ("status", "tasks"),
        [
            [coloured(Status[name]), f"{about.get(name, '')}{number:,}"]
            for name, number in found["counts"].items()
        ],
        right=["tasks"],
    )
    say("")
    _print_verdict(found["verdict"])
    say("")
    print_fields(_fields(found, hints))
    say("")
    if found["late"]:
        print_late(found["late"])
        say("")
    if found["on_time"]:
        print_on_time(found["on_time"])
        say("")
    _print_sweeps(found["sweeps"])
    say("")
    if found["workers"] or found["lost_workers"]:
        _print_workers(found["workers"], found["lost_workers"])
    if not found["workers"]:
        is_direct = found["timer"]["name"] == "direct"
        how = "delaytasks drain --forever" if is_direct else "celery -A … worker"
        say(hints.rewrite(f"no workers; start one with: {how}"), fg="yellow")


def _print_verdict(verdict: dict[str, Any]) -> None:
    say(verdict["headline"], **LEVEL_STYLES[verdict["level"]])
    for problem in verdict["problems"]:
        say(f"- {cell(problem['text'], 1000)}", **LEVEL_STYLES[problem["level"]])


def _alarm(text: str, is_bad: object) -> Cell:
    return (text, BAD if is_bad else "")


def _fields(found: dict[str, Any], hints: Hints) -> Iterator[tuple[str, Cell]]:
    """Yield the lines between the tables."""
    expired = found["expired_leases"]
    yield "overdue", _overdue_cell(found["overdue"])
    yield "lease over", _alarm(f"{expired:,}", expired)
    if paused := _paused_text(found, hints):
        yield "paused", (paused, "yellow")
    yield "database", _database_cell(found["database"], hints)
    yield "broker", _broker_cell(found["broker"])
    yield "timer", _timer_cell(found["timer"])
    yield "versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield "now", found["now"]


def _overdue_cell(overdue: dict[str, Any]) -> Cell:
    late = f"{overdue['count']:,}"
    if overdue["count"]:
        late += f", the oldest since {overdue['oldest']}, {show_duration(overdue['late_s'])} ago"
    return _alarm(late, overdue["count"])


def _paused_text(found: dict[str, Any], hints: Hints) -> str:
    paused = [each for each in found["policies"] if each["is_paused"]][:NAMED]
    names = [f"{each['kind']} {cell(each['name'])} ({each['held']:,} held)" for each in paused]
    more = found["policy_counts"]["paused"] - len(paused)
    if more:
        names.append(f"and {more:,} more; {hints.command} policy list shows them")
    return ", ".join(names)


def _database_cell(database: dict[str, Any], hints: Hints) -> Cell:
    url = database["url"]
    if database["error"]:
        return _alarm(f"{url}: down ({cell(database['error'])})", True)
    text = f"{url} ({database['server']}), revision {database['revision'] or 'unknown'}"
    if database["revision"] != database["head"]:
        text += f", this version has {database['head']}; run: {hints.command} db upgrade"
    return text


def _broker_cell(broker: dict[str, Any]) -> Cell:
    states = {True: "up", False: f"down ({cell(broker['error'])})", None: "not used"}
    return _alarm(f"{broker['url']}: {states[broker['is_up']]}", broker["is_up"] is False)


def _timer_cell(timer: dict[str, Any]) -> Cell:
    state = "up" if timer["is_up"] else "down"
    text = f"{timer['name']}, {timer['url'] or 'the database'}: {state}"
    near = [f"{name} {n['waiting'] + n['taken']:,}" for name, n in timer["queues"].items()]
    return _alarm(f"{text}; near tasks: {', '.join(near)}" if near else text, not timer["is_up"])


def _print_sweeps(sweeps: list[dict[str, Any]]) -> None:
    rows: list[list[Cell]] = []
    for sweep in sweeps:
        name = sweep["sweep_partition"]
        last = (_ago(sweep["age_s"]), BAD if sweep["is_late"] else GOOD)
        rows.append([name, last, sweep["armed_until"]])
    print_table(("sweep", "last", "armed until"), rows)


def _print_workers(workers: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
    rows = []
    for worker in workers:
        seen = (_ago(worker["age_s"]), GOOD if worker["is_alive"] else BAD)
        offset = f"{worker['clock_offset_s'] * 1000:+.1f}ms"
        rows.append(_worker_row(worker, seen, show_duration(worker["up_s"]), offset))
    for gone in lost:
        seen = (f"lost {_ago(gone['lost_s'])}", BAD)
        rows.append(_worker_row(gone, seen, NOTHING, NOTHING))
    print_table(
        ("worker", "seen", "up for", "pool", "busy", "queues", "clock offset", "version"),
        rows,
        folded="worker queues",
    )


def _worker_row(worker: dict[str, Any], seen: Cell, up_for: Cell, offset: Cell) -> list[Cell]:
    queues, busy = ", ".join(worker["queues"]), worker.get("busy")
    processes = worker["concurrency"] if busy is None else f"{busy}/{worker['concurrency']}"
    version = worker.get("version") or NOTHING
    return [worker["name"], seen, up_for, worker["pool"], processes, queues, offset, version]


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{show_duration(seconds)} ago"


#: The range whose error budget is shown.
BUDGET_OF = "day"


def print_on_time(shares: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each tag."""
    rows: list[list[Cell]] = []
    for one in shares:
        promised = "" if one["promised_s"] is None else show_duration(one["promised_s"])
        windows = [_share(one[name], one["target"]) for name in WINDOWS]
        rows.append([one["tag"], promised, *windows, _budget(one[BUDGET_OF])])
    ranges = [f"last {name}" for name in WINDOWS]
    heads = ["on time", "within", *ranges, f"error budget left, {BUDGET_OF}"]
    print_table(heads, rows, folded="on time")


def _share(numbers: dict[str, Any] | None, target: float) -> Cell:
    if numbers is None:
        return "–"
    text = f"{numbers['share']:.2%} ({numbers['late']:,} late)"
    return (text, BAD if numbers["share"] < target else "")


def _budget(numbers: dict[str, Any] | None) -> Cell:
    if numbers is None:
        return "–"
    left = numbers["budget_left"]
    return (f"{left:.0%}", BAD if left < 0 else "")
