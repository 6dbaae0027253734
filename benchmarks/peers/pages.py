"""Write docs/peers.md and its pictures from the JSON of `./dev bench --peers --json FILE`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.peers.catalogue import SYSTEMS
from benchmarks.peers.plots import Bar, bars
from benchmarks.peers.results import MEASURES, Results
from benchmarks.processes import ROOT
from benchmarks.report import short, spread

PAGE = ROOT / "docs" / "peers.md"
PICTURES = ROOT / "docs" / "images"


class PageTable(NamedTuple):
    title: str
    measures: tuple[str, ...]


class Picture(NamedTuple):
    name: str
    title: str
    #: Several measures are drawn one behind the other.
    measures: tuple[str, ...]
    by_tens: bool = False


#: The README shows this picture; docs/peers.md has all systems instead.
_README = Picture("burst-celery", "50,000 tasks due at one instant", ("burst",))
_README_BARS = {
    "delaytasks": "delaytasks, Redis",
    "celery": "Celery eta, Redis",
    "delaytasks_rabbitmq": "delaytasks, RabbitMQ",
    "celery_rabbitmq": "Celery eta, RabbitMQ",
}
_STEADY = tuple(f"steady_{rate}_{what}" for rate in (50, 1000) for what in ("p50", "p99", "early"))
_COST = ("steady_1000_worker", "steady_1000_servers")
_TABLES = (
    PageTable("Scheduling, and a burst at one instant", ("call", "bulk", "burst", "burst_p99")),
    PageTable("Steady work", _STEADY),
    PageTable("CPU per task at 1,000 tasks a second", _COST),
    PageTable(
        "Near tasks behind a backlog",
        ("backlog_ran", "backlog_without", "backlog_p99", "backlog_worker", "backlog_server"),
    ),
    PageTable("When a worker is killed", ("recovery_last", "recovery_missing")),
)
_PICTURES = (
    Picture("burst", "Burst: tasks due at one instant, drained", ("burst",)),
    Picture("call", "Scheduling, one call each", ("call",)),
    Picture("bulk", "Scheduling in bulk", ("bulk",)),
    Picture("steady-50", "50 tasks a second: lateness p99", ("steady_50_p99",), True),
    Picture("steady-1000", "1,000 tasks a second: lateness p99", ("steady_1000_p99",), True),
    Picture("cost", "1,000 tasks a second: CPU per task", _COST),
    Picture("backlog", "Behind a backlog: lateness p99 of near tasks", ("backlog_p99",), True),
    Picture("recovery", "A worker is killed: lateness of the last task", ("recovery_last",), True),
)


def write(file: Path, page: Path = PAGE, pictures: Path = PICTURES) -> list[Path]:
    """Write the page and the pictures, and return their paths."""
    results = Results.of_json(json.loads(file.read_text()))
    pictures.mkdir(exist_ok=True)
    written = [page]
    for picture in _PICTURES:
        if any(results.of(name) for name in picture.measures):
            path = pictures / f"peers-{picture.name}.svg"
            path.write_text(_drawn(picture, results))
            written.append(path)
    page.write_text(text(results, [path.name for path in written[1:]]))
    if all(results.of("burst").get(system) for system in _README_BARS):
        written.append(pictures / f"{_README.name}.svg")
        written[-1].write_text(_drawn(_README, results, _README_BARS))
    return written


def text(results: Results, pictures: Sequence[str]) -> str:
    """Return the whole page."""
    facts = " · ".join(f"{name} {value}" for name, value in results.machine.items())
    parts = [
        "# Comparison with other systems",
        "This page is for readers who choose a system for delayed tasks. It compares this project, "
        "bare Celery eta and other systems: each did the same work, in turn, in runs of "
        "`./dev bench --peers`. [Benchmarks](benchmarks.md#comparison-with-other-systems) "
        "describes the method. `./dev bench --pages docs/peers.json` writes this page.",
    ]
    if results.is_quick:
        parts.append(
            "**These figures are from a run with `--quick`**, which only checks that everything "
            "works: few tasks, one round, a machine that did other work. They are no comparison."
        )
    parts.append(facts)
    parts += [
        f"![{name.removeprefix('peers-').removesuffix('.svg')}](images/{name})" for name in pictures
    ]
    parts += [part for table in _TABLES for part in _table(table, results)]
    parts += _setups(results)
    return "\n\n".join(parts) + "\n"


def _table(table: PageTable, results: Results) -> Iterable[str]:
    measures = [MEASURES[name] for name in table.measures if results.of(name)]
    if not measures:
        return
    workloads = list(dict.fromkeys(measure.workload for measure in measures))
    footnotes: list[str] = []
    yield f"## {table.title}"
    yield "\n".join(
        f"- {_heading(workload)}: {results.sizes.get(workload, '?')}." for workload in workloads
    )
    heads = [f"{_short_heading(m.workload, workloads)}{m.what}, {m.unit}" for m in measures]
    lines = [f"| system | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for system, facts in results.systems.items():
        cells, marked = [], set()
        for measure in measures:
            remark = results.remarks.get(measure.workload, {}).get(system, "")
            mark = ""
            if remark and measure.workload not in marked:
                marked.add(measure.workload)
                footnotes += [] if remark in footnotes else [remark]
                mark = f"<sup>{footnotes.index(remark) + 1}</sup>"
            values = results.of(measure.name).get(system)
            cells.append((spread(values) if values else "–") + mark)
        lines.append(f"| {facts['title']} | {' | '.join(cells)} |")
    yield "\n".join(lines)
    if footnotes:
        yield "\n".join(f"{number}. {remark}" for number, remark in enumerate(footnotes, 1))


def _setups(results: Results) -> Iterable[str]:
    yield "## Configuration"
    lines = [
        "| system | version | servers | configuration | limitations |",
        "|---|---|---|---|---|",
    ]
    for facts in results.systems.values():
        setup = facts["setup"] + (f" ([source]({facts['source']}))" if facts["source"] else "")
        servers, limits = ", ".join(facts["servers"]), "; ".join(facts["limits"])
        lines.append(f"| {facts['title']} | {facts['version']} | {servers} | {setup} | {limits} |")
    yield "\n".join(lines)
    if results.left_out:
        yield (
            "Left out: "
            + "; ".join(f"{_title(name)}: {why}" for name, why in results.left_out.items())
            + "."
        )
    if results.failures:
        yield "Failed:\n\n" + "\n".join(f"- {failure}" for failure in results.failures)


def _title(name: str) -> str:
    return SYSTEMS[name].title if name in SYSTEMS else name


def _drawn(
    picture: Picture, results: Results, names: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Draw the systems in `names` under these names, or all systems under their titles."""
    first = MEASURES[picture.measures[0]]
    whats = [MEASURES[name].what for name in picture.measures] if len(picture.measures) > 1 else []
    shown = []
    for system in names or results.systems:
        facts = results.systems[system]
        title = names.get(system) or facts["title"].replace("`", "")
        is_ours = system.startswith("delaytasks")
        if first.workload == "burst" and facts.get("most_at_once"):
            title += f" ({facts['most_at_once']:,})"
        values = [results.of(name).get(system) for name in picture.measures]
        if not all(values):
            why = results.remarks.get(first.workload, {}).get(system, "")
            shown.append(Bar(title, (), is_ours=is_ours, instead=why))
            continue
        rounds = [sum(one) for one in zip(*filter(None, values), strict=False)]
        medians = [statistics.median(one) for one in values if one]
        shown.append(Bar(title, medians, min(rounds), max(rounds), is_ours))
    return bars(picture.title, first.unit, shown, picture.by_tens, whats)


def _heading(workload: str) -> str:
    rate = workload.removeprefix("steady_")
    return workload if rate == workload else f"{short(float(rate))}/s"


def _short_heading(workload: str, workloads: Sequence[str]) -> str:
    return (
        f"{_heading(workload)}: " if len(workloads) > 1 and workload.startswith("steady_") else ""
    )
