"""`drain`: what is overdue, or all there is for good, run straight from the table and without a broker."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from celery.exceptions import WorkerTerminate

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import cell, count, print_json, say
from delaytasks.core.clock import monotonic
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.maintenance.sweeper import tell_lapsed
from delaytasks.worker.standalone import StandaloneWorker

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.app import DelayTasks
    from delaytasks.execution.runner import Report
    from delaytasks.sharding.shard import Shard

#: Rows in one step of lapsing.
LAPSE_STEP = 500
#: What a process held that died is released within so long, and to be run.
LOST_S = 1.5
#: So many chunks in a row may fail as a whole.
MOST_ERRORS = 3


class _Abandon(WorkerTerminate):  # type: ignore[misc]  # Celery ships no types
    """Ctrl-C for the second time. Pool and runner take it for the end of the process, not for a task's failure."""


@click.command(epilog=EXIT_CODES)
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", help="Only this queue; may be given again."
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after so many tasks.")
@click.option(
    "--forever",
    is_flag=True,
    help="Go on with what falls due, as a worker does, until it is stopped.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(min=1),
    help="Processes that run tasks [with --forever the CPUs; else tasks run in this one].",
)
@pass_cli
def drain(
    cli: Cli, queues: tuple[str, ...], limit: int | None, forever: bool, concurrency: int | None
) -> None:
    """Run what is overdue, here and without a broker.

    \b
    delaytasks drain
    celery -A proj delays drain --queue mail --limit 1000
    delaytasks drain --forever

    Goes on until nothing is overdue, or with --forever until it is stopped. Workers may run at the same time, and as
    many of these as you like. A task that fails is FAILED, which is no error of this command. Ctrl-C and SIGTERM give
    back what did not begin and wait for what runs (exit code 1 if there may be more), a second one gives that up, too.
    """
    if forever and limit is not None:
        raise click.UsageError("--forever has no end, so no --limit")
    cli.import_processors()
    processes = concurrency or ((os.cpu_count() or 1) if forever else None)
    if processes is not None:
        _set_up_logging(cli, forever)
    if forever:
        _serve(cli, queues, processes)
        return
    run = DrainCommand(cli.delays, queues, limit, processes)
    with cli.guarded_stdout(), _progress(cli) as progress:
        run.until_empty(cli, progress)
    if cli.is_json:
        print_json(run.summary())
    else:
        _say_summary(run)
    if run.is_stopped:
        raise SystemExit(1)


def _serve(cli: Cli, queues: tuple[str, ...], processes: int | None) -> None:
    alone = StandaloneWorker(cli.delays, queues, processes, polls_table=True)
    with cli.guarded_stdout():
        cli.note(f"Runs what falls due, with concurrency {alone.pool.limit}; Ctrl-C ends it.")
        if (
            _served(alone, cli, "Waiting for what runs; once more to give it up.", lambda: False)
            > 1
        ):
            raise SystemExit(1)


class DrainCommand:
    """Has what is overdue run, shard after shard, and counts what became of the tasks."""

    def __init__(
        self, delays: DelayTasks, queues: tuple[str, ...], limit: int | None, processes: int | None
    ) -> None:
        self._alone = StandaloneWorker(
            delays,
            queues,
            processes,
            polls_table=False,
            on_report=self._add,
            row_budget=limit,
        )
        self._delays = delays
        self._queues = frozenset(queues)
        self._dispatcher = self._alone.runtime.dispatcher
        self._began_at = monotonic()
        self._down: StoreError | None = None
        self._claimed = self._errors = 0
        self._error = ""
        self._lost_at = float("-inf")
        self._progress: tuple[Progress, Any] | None = None
        self.is_stopped = False
        self.counts: Counter[str] = Counter()
        self.unknown_tags: set[str] = set()
        delays.events.subscribe(self._note)

    def until_empty(self, cli: Cli, progress: Progress) -> None:
        self._progress = progress, progress.add_task("", failed=0)
        passes = self._passes()

        def is_over() -> bool:
            if self._dispatcher.row_budget == 0:
                return not self._dispatcher.in_flight
            if self._dispatcher.is_busy or monotonic() - self._lost_at < LOST_S:
                return False
            return next(passes, None) is None

        note = "Stopping after the current chunk; once more to stop at once."
        self.is_stopped = _served(self._alone, cli, note, is_over) > 0
        if self._down is not None:
            raise self._down

    def summary(self) -> dict[str, Any]:
        return {
            "ran": self.counts["task.succeeded"] + self.counts["task.failed"],
            "succeeded": self.counts["task.succeeded"],
            "failed": self.counts["task.failed"],
            "without_processor": self.counts["task.no_processor"],
            "unknown_tags": sorted(self.unknown_tags),
            "lapsed": self.counts["task.recovered"],
            "seconds": round(monotonic() - self._began_at, 3),
            "is_stopped": self.is_stopped,
        }

    # -- what is overdue --------------------------------------------------------------------------

    def _passes(self) -> Iterator[bool]:
        """Each one asks for all that is overdue in a shard, until a pass brings nothing."""
        total = 0
        for shard in self._delays.shards:
            try:
                total += overdue(shard)
                self._show(total=total)
                self._lapse(shard)
                while self._ask(shard):
                    claimed = self._claimed
                    yield True
                    if self._errors > MOST_ERRORS:
                        raise StoreError(self._error)
                    if self._claimed == claimed:
                        break
            except StoreError as error:  # the tasks of the others need not wait for it
                self._down = error

    def _lapse(self, shard: Shard) -> None:
        delays = self._delays
        while (
            lapsed := shard.store.sweeps.lapse(delays.settings.max_lost_leases, LAPSE_STEP)
        ).total:
            tell_lapsed(delays.events, lapsed)

    def _ask(self, shard: Shard) -> bool:
        by_queue: dict[str, list[int]] = {}
        for level in shard.store.sweeps.levels(0):
            if not self._queues or level.queue in self._queues:
                by_queue.setdefault(level.queue, []).append(level.priority)
        for queue, priorities in by_queue.items():
            self._dispatcher.drain(queue, priorities, shard.number)
        return bool(by_queue)

    # -- what became of it ------------------------------------------------------------------------

    def _add(self, report: Report) -> None:
        self._claimed += report.claimed
        if report.error:
            self._errors, self._error = self._errors + 1, report.error
        elif report.claimed:
            self._errors = 0
        for name, tag, number in report.counts:
            self.counts[name] += number
            if tag:
                self.unknown_tags.add(tag)
        self._show(advance=report.ran, failed=self.counts["task.failed"])

    def _show(self, **numbers: Any) -> None:
        if self._progress is not None:
            progress, bar = self._progress
            progress.update(bar, **numbers)

    def _note(self, name: str, fields: dict[str, Any]) -> None:
        if name == "task.recovered":
            self.counts[name] += fields.get("count", 1)
        elif name == "task.worker_lost":
            self.counts["task.failed"] += 1
        elif name == "chunk.failed":
            self._claimed += 1  # there was something
            self._lost_at = monotonic()


def overdue(shard: Shard) -> int:
    from delaytasks.storage.stats import Stats

    return Stats(shard.store.database, shard.store.schema).overdue(0).tasks


def _say_summary(run: DrainCommand) -> None:
    found = run.summary()
    took = show_duration(found["seconds"])
    say(
        f"ran {count(found['ran'], 'task')} in {took}: {found['succeeded']:,} DONE, {found['failed']:,} FAILED"
    )
    if found["lapsed"]:
        say(f"{count(found['lapsed'], 'task')} had lost their worker")
    if found["without_processor"]:
        tags = ", ".join(cell(tag) for tag in found["unknown_tags"])
        say(
            f"{count(found['without_processor'], 'task')} without processor, tried again later: {tags}",
            fg="yellow",
        )
    if run.is_stopped:
        say("stopped; there may be more", fg="yellow")


# -- processes ------------------------------------------------------------------------------------


def _served(alone: StandaloneWorker, cli: Cli, note: str, is_over: Callable[[], bool]) -> int:
    """Runs it to its end; returns how many signals wanted that."""
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
    """As a worker has it. The processes that are forked have it as well."""
    if cli.is_json:
        cli.app.log.already_setup = True  # stderr is for one JSON document
    else:
        cli.app.log.setup(loglevel="INFO" if forever else "WARNING", redirect_stdouts=False)


def _progress(cli: Cli) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]:,} failed"),
        TimeElapsedColumn(),
        console=console,
        disable=cli.is_json or not console.is_terminal,
        transient=True,
    )
