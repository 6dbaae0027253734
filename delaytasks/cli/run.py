"""`run`: run tasks straight from the table, without a broker."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click
from celery.exceptions import WorkerTerminate

from delaytasks.cli.context import Cli, Command, moved_bar, pass_cli
from delaytasks.cli.output import NOTED, Part, cell
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import show_duration
from delaytasks.model.text import count
from delaytasks.operate.state_queries import OverdueRows
from delaytasks.run.runner import Report
from delaytasks.worker.sweep import emit_recovered
from delaytasks.worker.worker_runtime import StandaloneWorker

#: Abandoned rows that one statement recovers.
RECOVER_STEP = 500
#: Seconds within which the rows of a dead pool process are released.
LOST_S = 1.5
#: Consecutive chunks that may fail as a whole.
MOST_ERRORS = 3


class _Abandon(WorkerTerminate):  # type: ignore[misc]  # Celery ships no types
    """The second Ctrl-C. Pool and runner treat it as the end of the process, not as a failure."""


@click.command(cls=Command)
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", help="Only this queue. Repeatable."
)
@click.option(
    "--forever", is_flag=True, help="Run tasks as they fall due, like a worker, until stopped."
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(min=1),
    help="Processes that run tasks [with --forever the CPUs; else tasks run in this process].",
)
@pass_cli
def run(cli: Cli, queues: tuple[str, ...], forever: bool, concurrency: int | None) -> None:
    """Run overdue tasks here, without a broker.

    \b
    delaytasks run
    celery -A proj delays run --queue mail
    delaytasks run --forever

    Ends when no task is overdue, or with --forever when it is stopped. Workers and other calls may
    run at the same time. A task that fails becomes FAILED, which is no error of this command. After
    Ctrl-C or SIGTERM, tasks that have not begun are given back, and running tasks end (exit code 1
    if there may be more tasks). A second signal also gives up the running tasks.
    """
    cli.import_processors()
    processes = concurrency or ((os.cpu_count() or 1) if forever else None)
    if processes is not None:
        _set_up_logging(cli, forever)
    if forever:
        alone = StandaloneWorker(cli.delays, queues, processes, polls_table=True)
        limit = alone.pool.limit
        cli.note(f"Runs tasks as they fall due, with concurrency {limit}; Ctrl-C ends it.")
        note = "Waiting for running tasks; once more to give them up."
        with cli.guarded_stdout():
            is_incomplete = _run(alone, cli, note, lambda: False) > 1
    else:
        with cli.guarded_stdout():
            found = OverdueRun(cli, queues, processes).until_empty()
        is_incomplete = found["is_stopped"]
        cli.answer(found, *_parts(found))
    if is_incomplete:
        raise SystemExit(1)


class OverdueRun:
    """Runs the overdue tasks, and counts the outcomes."""

    def __init__(self, cli: Cli, queues: tuple[str, ...], processes: int | None) -> None:
        self._cli = cli
        self._alone = StandaloneWorker(
            cli.delays, queues, processes, polls_table=False, on_report=self._add
        )
        self._queues = frozenset(queues)
        self._dispatcher = self._alone.runtime.dispatcher
        self._began_at = monotonic()
        self._down: StoreError | None = None
        self._claimed = self._errors = 0
        self._error = ""
        self._process_lost_at = float("-inf")
        self._counts = Counter[str]()
        #: How many tasks have no processor, by tag.
        self._unknown_tags = Counter[str]()
        self._progress = moved_bar(cli, "ran")
        cli.delays.events.subscribe(self._on_event)

    def until_empty(self) -> dict[str, Any]:
        """Run until no task is overdue, or until a signal. Return the counts."""
        passes = self._passes()

        def is_over() -> bool:
            if self._dispatcher.is_busy or monotonic() - self._process_lost_at < LOST_S:
                return False
            return next(passes, None) is None

        note = "Stopping after the current chunk; once more to stop immediately."
        with self._progress:
            self._progress.add_task("", moved=0)
            is_stopped = _run(self._alone, self._cli, note, is_over) > 0
        if self._down is not None:
            raise self._down
        counts = {name: self._counts[name] for name in ("succeeded", "failed", "recovered")}
        return {
            "ran": counts["succeeded"] + counts["failed"],
            **counts,
            "without_processor": sum(self._unknown_tags.values()),
            "unknown_tags": sorted(self._unknown_tags),
            "seconds": round(monotonic() - self._began_at, 3),
            "is_stopped": is_stopped,
        }

    def _passes(self) -> Iterator[bool]:
        """Dispatch the overdue tasks, until a pass claims none."""
        try:
            store, settings = self._cli.store, self._cli.delays.settings
            overdue = OverdueRows(store.database, store.schema).count(0).tasks
            self._progress.update(self._progress.task_ids[0], total=overdue)
            which = settings.max_lost_leases, RECOVER_STEP, settings.lost_s
            while (recovered := store.leases.recover(*which)).total:
                emit_recovered(self._cli.delays.events, recovered)
            while self._dispatch():
                claimed = self._claimed
                yield True
                if self._errors > MOST_ERRORS:
                    raise StoreError(self._error)
                if self._claimed == claimed:
                    break
        except StoreError as error:
            self._down = error

    def _dispatch(self) -> bool:
        by_queue: dict[str, list[int]] = {}
        for level in self._cli.store.sweeps.levels(0):
            if not self._queues or level.queue in self._queues:
                by_queue.setdefault(level.queue, []).append(level.priority)
        for queue, priorities in by_queue.items():
            self._dispatcher.start_drain(queue, priorities)
        return bool(by_queue)

    def _add(self, report: Report) -> None:
        self._claimed += report.claimed
        if report.error:
            self._errors, self._error = self._errors + 1, report.error
        elif report.claimed:
            self._errors = 0
        for tag, counts in report.statistics.tags:
            self._counts["succeeded"] += counts["done"]
            self._counts["failed"] += counts["failed"]
            if self._cli.runtime.registry.get(tag) is None and counts["given_back"]:
                self._unknown_tags[tag] += counts["given_back"]
        ran = self._counts["succeeded"] + self._counts["failed"]
        self._progress.update(self._progress.task_ids[0], completed=ran, moved=ran)

    def _on_event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "task.recovered":
            self._counts["recovered"] += fields.get("count", 1)
        elif name == "task.worker_lost":
            self._counts["failed"] += 1
        elif name == "chunk.failed":
            self._claimed += 1  # the chunk had tasks, so another pass is needed
            self._process_lost_at = monotonic()


def _parts(found: dict[str, Any]) -> Iterator[Part]:
    ran, took = count(found["ran"], "task"), show_duration(found["seconds"])
    yield f"ran {ran} in {took}: {found['succeeded']:,} DONE, {found['failed']:,} FAILED"
    if found["recovered"]:
        yield f"{count(found['recovered'], 'task')} had lost their worker"
    if found["without_processor"]:
        tasks, tags = count(found["without_processor"], "task"), map(cell, found["unknown_tags"])
        yield f"{tasks} without processor, tried again later: {', '.join(tags)}", NOTED
    if found["is_stopped"]:
        yield "stopped; there may be more", NOTED


# -- processes ------------------------------------------------------------------------------------


def _run(alone: StandaloneWorker, cli: Cli, note: str, is_over: Callable[[], bool]) -> int:
    """Run the worker until `is_over` or a signal; return the number of signals."""
    signalled: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signalled.append(number)
        if len(signalled) > 1:
            raise _Abandon
        alone.stop_soon()
        cli.note(note)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        alone.start()
        alone.run(is_over)
        alone.stop()
    except _Abandon:
        alone.abandon()
    except BaseException:
        alone.stop()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return len(signalled)


def _set_up_logging(cli: Cli, forever: bool) -> None:
    """Set up the log of a worker, also for the processes that are forked later."""
    if cli.is_json:
        cli.app.log.already_setup = True  # stderr is for one JSON document
    else:
        cli.app.log.setup(loglevel="INFO" if forever else "WARNING", redirect_stdouts=False)
