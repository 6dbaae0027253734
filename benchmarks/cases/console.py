"""The console in front of a large table: the duration of its pages, and the cost of open ones."""

from __future__ import annotations

import secrets
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

from sqlalchemy import insert, select, update

from benchmarks import ours
from benchmarks.cases.loads import run_steadily
from benchmarks.figures import late, percentile
from benchmarks.processes import BenchmarkProcess, free_port
from benchmarks.run import Stage
from benchmarks.servers import POSTGRESQL
from benchmarks.side import Figures, Side
from benchmarks.viewers import USER
from benchmarks.waiting import BenchError, wait_until
from delaytasks import Status
from delaytasks.console.application import USERS
from delaytasks.console.requests import Role, UserFile
from delaytasks.model.body import dump_json
from delaytasks.operate.statistics import COUNTS_KEPT
from delaytasks.run.observers import RunCounts
from delaytasks.runtime import runtime_of

#: The number of waiting rows, and how many finished rows there are for each of them.
PENDING, QUICK_PENDING, FINISHED = 10_000_000, 50_000, 5
#: Tasks that failed, each with another text of the same error, and its own pair in its meta.
FAILED = 1000
#: The tags of the statistics.
TAGS = 20
HOUR_S, DAY_S = 3600.0, 86_400.0
#: How often each page is read, and seconds before each of these turns, so that the next one finds
#: some shared numbers too old.
TURNS, APART_S = 40, 2.0
VIEWERS, PAIRS = 50, 3
#: The user who reads the pages; the role `view` may not search by meta.
READER = "reader"


def console(stage: Stage, side: Side) -> Figures:
    with side.serving():
        failed_id, key = _fill(side, stage.size(PENDING, QUICK_PENDING))
        with _served(side) as address:
            found = _page_times(stage, address, failed_id, key)
            seconds = stage.size(60, 6)
            idle = _database_percent(side, seconds)
            with _viewing(side, address, 1):
                viewed = _database_percent(side, seconds)
            found["an open overview, % of a core of the database"] = viewed - idle
            alone, watched = list[float](), list[float]()
            for _ in range(stage.size(PAIRS, 1)):
                alone += _steady(stage, side)
                with _viewing(side, address, VIEWERS):
                    watched += _steady(stage, side)
    return found | late(alone, "50/s, ") | late(watched, f"50/s with {VIEWERS} viewers, ")


def _steady(stage: Stage, side: Side) -> list[float]:
    """Run steady work in front of rows that stay."""
    side.notes.clear()
    run_steadily(stage, side)
    return side.lateness_ms()


def _fill(side: Side, pending: int) -> tuple[str, str]:
    """Fill the tables. Return the id of a task that failed, and the key of one that waits."""
    rows, tasks = side.rows, side.rows.schema.tasks
    with rows.indexed_at_the_end():
        rows.fill(FINISHED * pending, Status.DONE, -7 * DAY_S, -HOUR_S, is_keyed=True)
        rows.fill(FAILED, Status.FAILED, -DAY_S, -HOUR_S)
        rows.fill(pending, Status.NOT_COMPLETE, 2 * HOUR_S, 7 * DAY_S, is_keyed=True)
    is_failed = tasks.c.status == int(Status.FAILED)
    id = tasks.c.id.cast(tasks.c.message_body.type)
    texts = {"error_stack": "ValueError: order " + id + " is not paid"}
    texts["meta"] = '{"order":"' + id + '"}'
    rows.execute(update(tasks).where(is_failed).values(texts))
    _fill_statistics(side)
    key = rows.take_keys()
    rows.settle_down()
    return str(rows.read(select(tasks.c.id).where(is_failed).limit(1))[0][0]), key


def _fill_statistics(side: Side) -> None:
    """Store what a deployment has that runs 20 tags all the time."""
    store, now = runtime_of(side.delays).store, runtime_of(side.delays).clock.certain_now()
    counts = RunCounts()
    for number in range(50):
        counts.add_run(0.002 * number, 0.1)
        counts["done"] += 1
    minute, text = now.replace(second=0, microsecond=0), dump_json(counts)
    side.rows.execute(store.schema.statistics.delete())
    with store.database.begin() as connection:
        made = (
            {"fingerprint": "", "start": start, "tag": f"shop.{n}", "counts": text}
            for ago in range(COUNTS_KEPT // timedelta(minutes=1))
            for start in [minute - timedelta(minutes=ago)]
            for n in range(TAGS)
        )
        while batch := list(islice(made, 10_000)):
            connection.execute(insert(store.schema.statistics), batch)


@contextmanager
def _served(side: Side) -> Iterator[str]:
    """Start `delaytasks serve --console`, and yield its address."""
    port, folder = free_port(), side.folder
    command = ["delaytasks", "-A", "benchmarks.ours", "serve", f"--console={port}"]
    command += ["--proxy-header", USER]
    UserFile(folder / USERS).set(READER, secrets.token_urlsafe(), Role.OPERATE)
    served = BenchmarkProcess("console", command, folder, BENCH_DATA_DIR=str(folder))
    address = f"http://127.0.0.1:{port}/"

    def answers() -> bool:
        try:
            return bool(_read(address))
        except OSError:
            return False

    try:
        wait_until(answers, 30, "the console to answer", 0.2)
        yield address
    except BenchError as error:
        raise BenchError(f"{error}; the console:\n{served.last_words()}") from error
    finally:
        served.stop()


def _read(address: str) -> str:
    request = urllib.request.Request(address, headers={USER: READER})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def _page_times(stage: Stage, address: str, failed_id: str, key: str) -> Figures:
    """Read all pages in turn. The first turn is not measured, since it loads code."""
    pages = {
        "overview": "",
        "overview of two days": "?period=two+days",
        "tasks": "tasks",
        "tasks that failed": "tasks?status=FAILED",
        "tasks that wait": "tasks?status=NOT_COMPLETE",
        "finished tasks, the oldest first": "tasks?status=DONE&order=oldest",
        "tasks of a tag": f"tasks?tag={ours.TAG}",
        "tasks of a key": f"tasks?tag={ours.TAG}&key={key}",
        "tasks of a queue": "tasks?queue=default",
        "tasks by meta": f"tasks?status=FAILED&meta=order%3D{failed_id}",
        "tasks by error": "tasks?status=FAILED&error=is+not+paid",
        "one tag": "tag?name=shop.0",
        "one task": f"tasks/{failed_id}",
    }
    others = "tags failures recurring policies queues workers audit"
    pages |= {name: name for name in others.split()}
    took_ms: dict[str, list[float]] = {name: [] for name in pages}
    for turn in range(stage.size(TURNS, 3) + 1):
        time.sleep(APART_S)
        for name, path in pages.items():
            began = time.perf_counter()
            page = _read(address + path)
            if turn:
                took_ms[name].append((time.perf_counter() - began) * 1000)
            if name.startswith("tasks") and "No task matches" in page:
                raise BenchError(f"the page {name!r} is empty")
    found: Figures = {}
    for name, each in took_ms.items():
        found |= {f"{name}: p50, ms": percentile(each, 0.5), f"{name}: longest, ms": max(each)}
        found[f"page {name}: p95, ms"] = percentile(each, 0.95)
    return found


def _database_percent(side: Side, seconds: int) -> float:
    """Return the CPU time of PostgreSQL in the next seconds, in percent of one core."""
    before = side.servers.cpu_s(POSTGRESQL)
    time.sleep(seconds)
    return (side.servers.cpu_s(POSTGRESQL) - before) / seconds * 100


@contextmanager
def _viewing(side: Side, address: str, count: int) -> Iterator[None]:
    """Let some viewers look at the overview."""
    command = ["benchmarks.viewers", address, str(count)]
    viewers = BenchmarkProcess("viewers", command, side.folder)
    try:
        viewers.expect("ready", 60)
        yield
        viewers.tell("")
        answers, errors = map(int, viewers.expect("answers", 10).split())
        if errors or not answers:
            raise BenchError(f"{errors} pages of {answers + errors} were errors")
    finally:
        viewers.stop()
