"""`run`: run tasks straight from the table, without a broker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import NOTED, Part
from delaytasks.model.clock import monotonic
from delaytasks.model.inputs import serves, show_duration
from delaytasks.model.text import count
from delaytasks.worker.worker_runtime import StandaloneWorker

#: Chunks that may fail as a whole before the command gives up.
MOST_FAILED_CHUNKS = 10


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
    if there may be more tasks). A second signal ends the command immediately, as if it was killed.
    """
    cli.import_processors()
    processes = concurrency or ((os.cpu_count() or 1) if forever else None)
    if processes is not None:
        _set_up_logging(cli, forever)
    began_at = monotonic()
    alone = StandaloneWorker(cli.delays, queues, processes, may_detach=forever)
    if forever:
        limit = alone.pool.limit
        cli.note(f"Runs tasks as they fall due, with concurrency {limit}; Ctrl-C ends it.")
    else:
        cli.delays._runtime.sweeper.sweep()  # the tasks of dead workers are overdue too
    with cli.guarded_stdout():
        is_stopped = _run(alone, cli, (lambda: False) if forever else _nothing_overdue(alone))
    if not forever:
        found = {**_counts(alone), "seconds": monotonic() - began_at, "is_stopped": is_stopped}
        cli.answer(found, *_parts(found))
        if is_stopped or found["failed_chunks"]:
            raise SystemExit(1)


def _nothing_overdue(alone: StandaloneWorker) -> Callable[[], bool]:
    """Return a function that drains the overdue tasks again until a pass claims none of them."""
    runtime, progress = alone.runtime, -1

    def is_over() -> bool:
        nonlocal progress
        dispatcher, failed = runtime.dispatcher, runtime.events.counts["chunk.failed"]
        if dispatcher.is_busy:
            return False
        before, progress = progress, dispatcher.claimed + failed
        if progress == before or failed > MOST_FAILED_CHUNKS:
            return True
        late = runtime.store.sweeps.levels(0)
        levels = [level for level in late if serves(runtime.processes.queues, level.queue)]
        for level in levels:
            dispatcher.start_drain(level.queue, [level.priority])
        return not levels

    return is_over


def _counts(alone: StandaloneWorker) -> dict[str, Any]:
    runtime = alone.runtime
    counted = {} if runtime.statistics is None else runtime.statistics.totals()
    return {
        "claimed": runtime.dispatcher.claimed,
        "succeeded": sum(counts["done"] for counts in counted.values()),
        "failed": sum(counts["failed"] + counts["worker_lost"] for counts in counted.values()),
        "failed_chunks": runtime.events.counts["chunk.failed"],
    }


def _parts(found: dict[str, Any]) -> Iterator[Part]:
    claimed, took = count(found["claimed"], "task"), show_duration(found["seconds"])
    yield f"took {claimed} in {took}: {found['succeeded']:,} DONE, {found['failed']:,} FAILED"
    if found["failed_chunks"]:
        yield f"{count(found['failed_chunks'], 'chunk')} failed as a whole: see the log", NOTED
    if found["is_stopped"]:
        yield "stopped; there may be more", NOTED


# -- processes ------------------------------------------------------------------------------------


def _run(alone: StandaloneWorker, cli: Cli, is_over: Callable[[], bool]) -> bool:
    """Run the worker until `is_over` or a signal; return whether there was one."""
    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        for each in before:
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process
        alone.stop_soon()
        cli.note("Waiting for running tasks; once more to end immediately.")

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, stop)
    try:
        alone.start()
        alone.run(is_over)
    finally:
        alone.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return is_stopped


def _set_up_logging(cli: Cli, forever: bool) -> None:
    """Set up the log of a worker, also for the processes that are forked later."""
    if cli.is_json:
        cli.app.log.already_setup = True  # stderr is for one JSON document
    else:
        cli.app.log.setup(loglevel="INFO" if forever else "WARNING", redirect_stdouts=False)
