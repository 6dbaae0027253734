"""The console and Django's admin in front of a large table: the duration of their pages, and the
cost of open ones."""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import insert, select, update

from benchmarks import brokers, machine, ours, table
from benchmarks.cases import steady
from benchmarks.figures import Target, percentile
from benchmarks.page_times import page_times
from benchmarks.processes import BenchmarkProcess, free_port
from benchmarks.sides import Ours, Side
from benchmarks.stage import CaseContext
from benchmarks.viewers import USER
from benchmarks.waiting import BenchError, wait_until
from delaytasks.console.application import USERS
from delaytasks.console.viewers import Role, UserFile
from delaytasks.model.body import dump_json
from delaytasks.model.moves import Status
from delaytasks.operate.statistics_table import COUNTS_KEPT
from delaytasks.run.observers import RunCounts
from delaytasks.runtime import runtime_of

#: The number of waiting rows, and how many finished rows there are for each of them.
PENDING, QUICK_PENDING = 10_000_000, 100_000
FINISHED = 5
#: Tasks that failed, each with another text of the same error, and its own pair in its meta.
FAILED = 1000
#: The tags of the statistics.
TAGS = 20
HOUR_S, DAY_S = 3600.0, 86_400.0
#: How often each page is read, and seconds before each of these turns, so that the next one finds
#: some shared numbers too old.
TURNS, APART_S = 40, 2.0
#: The targets for a page and for the page of one task, in milliseconds, and for the database.
PAGE_MS, TASK_MS, OPEN_PERCENT = 150, 50, 2
OPEN_S, VIEWERS, PAIRS = 60.0, 50, 3
ADMIN_DEADLINE_S = 600.0
#: The user who reads the pages; the role `view` may not search by meta.
READER = "reader"


class Examples(NamedTuple):
    """One of the tasks that failed, and the key of one that waits."""

    failed_id: str
    key: str


class Watched(Ours):
    """delaytasks in front of rows that stay. Tasks are counted by their notes."""

    is_done, lateness_ms = Side.is_done, Side.lateness_ms

    def clear(self) -> None:
        self.notes.clear()


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("console: skipped, since only PostgreSQL creates these rows within minutes")
        return
    examples = _fill(stage, stage.size(PENDING, QUICK_PENDING))
    with _served(stage) as address:
        _measure_pages(stage, address, examples)
        _measure_open_page(stage, address)
        _measure_viewers(stage, address)
    _measure_admin(stage, examples)
    brokers.clear()
    table.clear()


def _fill(stage: CaseContext, pending: int) -> Examples:
    """Fill the tables, and return rows for the pages that show one."""
    table.clear()
    with table.indexed_at_the_end():
        table.fill(FINISHED * pending, Status.DONE, -7 * DAY_S, -HOUR_S, is_keyed=True)
        table.fill(FAILED, Status.FAILED, -DAY_S, -HOUR_S)
        table.fill(pending, Status.NOT_COMPLETE, 2 * HOUR_S, 7 * DAY_S, is_keyed=True)
    store = runtime_of(ours.delays).store
    database, tasks = store.database, store.schema.tasks
    is_failed = tasks.c.status == int(Status.FAILED)
    id = tasks.c.id.cast(tasks.c.message_body.type)
    texts = {"error_stack": "ValueError: order " + id + " is not paid"}
    texts["meta"] = '{"order":"' + id + '"}'
    database.autocommitted(lambda c: c.execute(update(tasks).where(is_failed).values(texts)))
    _fill_statistics()
    key = table.take_keys()
    table.settle_down()
    failed = database.autocommitted(
        lambda c: c.scalar(select(tasks.c.id).where(is_failed).limit(1))
    )
    stage.say(f"console: {pending:,} wait and {FINISHED * pending:,} are finished")
    return Examples(str(failed), key)


def _fill_statistics() -> None:
    """Store what a deployment has that runs 20 tags all the time."""
    store, now = runtime_of(ours.delays).store, runtime_of(ours.delays).clock.certain_now()
    counts = RunCounts()
    for number in range(50):
        counts.add_run(0.002 * number, 0.1, None)
        counts["done"] += 1
    minute, text = now.replace(second=0, microsecond=0), dump_json(counts)
    rows = [
        {"start": minute - timedelta(minutes=ago), "tag": f"shop.{n}", "counts": text}
        for ago in range(COUNTS_KEPT // timedelta(minutes=1))
        for n in range(TAGS)
    ]
    statistics = store.schema.statistics
    store.database.autocommitted(lambda c: c.execute(statistics.delete()))
    with store.database.begin() as connection:
        connection.execute(insert(statistics), rows)


@contextmanager
def _served(stage: CaseContext) -> Iterator[str]:
    """Start `delaytasks serve --console`, and yield its address."""
    port = free_port()
    command = ["delaytasks", "-A", Ours.app_path, "serve", f"--console={port}"]
    command += ["--proxy-header", USER]
    folder = stage.ours.folder
    UserFile(folder / USERS).set(READER, secrets.token_urlsafe(), Role.OPERATE)
    console = BenchmarkProcess("console", command, folder, BENCH_DATA_DIR=str(folder))
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_until(lambda: _answers(address), 30, "the console to answer", 0.2)
        yield address
    except BenchError as error:
        raise BenchError(f"{error}; the console:\n{console.last_words()}") from error
    finally:
        console.stop()


def _answers(address: str) -> bool:
    try:
        _read(address)
    except OSError:
        return False
    return True


def _read(address: str) -> str:
    request = urllib.request.Request(address, headers={USER: READER})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def _pages_of(examples: Examples, failures_of_one_error: str) -> dict[str, str]:
    """Return the address of each page by its name."""
    return {
        "overview": "",
        "overview of two days": "?period=two+days",
        "tasks": "tasks",
        "tasks that failed": "tasks?status=FAILED",
        "tasks that wait": "tasks?status=NOT_COMPLETE",
        "finished tasks, the oldest first": "tasks?status=DONE&order=oldest",
        "tasks of a tag": f"tasks?tag={ours.TAG}",
        "tasks of a key": f"tasks?tag={ours.TAG}&key={examples.key}",
        "tasks of a queue": "tasks?queue=default",
        "tasks by meta": "tasks?status=FAILED&meta=order%3D" + examples.failed_id,
        "tasks by error": "tasks?status=FAILED&error=is+not+paid",
        "tags": "tags",
        "one tag": "tag?name=shop.0",
        "failures": "failures",
        "failures of one error": failures_of_one_error,
        "forecast": "forecast",
        "recurring": "recurring",
        "policies": "policies",
        "queues": "queues",
        "workers": "workers",
        "audit": "audit",
        "one task": f"tasks/{examples.failed_id}",
    }


def _measure_pages(stage: CaseContext, address: str, examples: Examples) -> None:
    """Read all pages in turn."""
    link = re.search(r'href="/(failures/[^"]+)"', _read(address + "failures"))
    if link is None:
        raise BenchError("console: the page of failures has no group")
    pages = _pages_of(examples, link[1])

    def read(name: str) -> None:
        found = _read(address + pages[name])
        if "No task matches" in found and name.startswith("tasks"):
            raise BenchError(f"console: the page {name!r} is empty")

    _report(stage, page_times(pages, stage.size(TURNS, 3), read, APART_S))


def _report(stage: CaseContext, took: dict[str, list[float]]) -> None:
    """Report the durations of each page."""
    for name, each in took.items():
        target = Target("value", most=TASK_MS if name == "one task" else PAGE_MS)
        is_ours = not name.startswith("admin")
        stage.figure("console", f"{name}: p95", "ms", target if is_ours else None).add(
            percentile(each, 0.95)
        )
        stage.say(
            f"console: {name}: p50 {percentile(each, 0.5):.1f} ms, p95 "
            f"{percentile(each, 0.95):.1f} ms, longest {max(each):.1f} ms"
        )


def _measure_open_page(stage: CaseContext, address: str) -> None:
    """Compare the database's CPU without viewers with that of one open overview."""
    seconds = stage.size(int(OPEN_S), 6)
    idle = _database_percent(seconds)
    with _viewing(stage, address, 1):
        viewed = _database_percent(seconds)
    figure = stage.figure(
        "console",
        "an open overview: database's CPU, of one core",
        "%",
        Target("value", most=OPEN_PERCENT),
        against="without:",
    )
    figure.add(viewed - idle, idle)


def _database_percent(seconds: int) -> float:
    """Return the CPU time of PostgreSQL in the next seconds, in percent of one core."""

    def spent_s() -> float:
        usage = machine.usage_of("postgres")
        if usage is None:
            raise BenchError("console: PostgreSQL does not run on this machine")
        return usage.cpu_s

    before = spent_s()
    time.sleep(seconds)
    return (spent_s() - before) / seconds * 100


@contextmanager
def _viewing(stage: CaseContext, address: str, count: int) -> Iterator[None]:
    """Let some viewers look at the overview."""
    command = ["benchmarks.viewers", address, str(count)]
    viewers = BenchmarkProcess("viewers", command, stage.ours.folder)
    try:
        viewers.expect("ready", 60)
        yield
        viewers.tell("")
        answers, errors = map(int, viewers.expect("answers", 10).split())
        stage.say(f"console: {count} viewers got {answers:,} pages and {errors:,} errors")
        if errors or not answers:
            raise BenchError(f"console: {errors} pages of {answers + errors} were errors")
    finally:
        viewers.stop()


def _measure_viewers(stage: CaseContext, address: str) -> None:
    """Compare the lateness of 50 tasks per second with and without viewers."""
    side = Watched(stage.ours.folder, stage.ours.notes)
    alone: list[float] = []
    watched: list[float] = []
    with side.serving():
        for _ in range(stage.size(PAIRS, 1)):
            side.clear()
            alone += steady.work(stage, side)
            side.clear()
            with _viewing(stage, address, VIEWERS):
                watched += steady.work(stage, side)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        what = f"50 tasks a second with {VIEWERS} viewers, lateness {name}"
        figure = stage.figure("console", what, "ms", against="without:")
        figure.add(percentile(watched, share), percentile(alone, share))


def _measure_admin(stage: CaseContext, examples: Examples) -> None:
    """Let a process read the pages of Django's admin."""
    command = ["benchmarks.admin_pages", str(stage.size(TURNS, 3)), *examples]
    admin = BenchmarkProcess("admin", command, stage.ours.folder)
    try:
        _report(stage, json.loads(admin.expect("measured", ADMIN_DEADLINE_S)))
    finally:
        admin.stop()
