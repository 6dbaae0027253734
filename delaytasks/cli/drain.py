"""`drain`: what is overdue, run in this process, straight from the table and without a broker."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import cell, count, print_json, say
from delaytasks.core.clock import from_us, monotonic
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.core.loop import Loop
from delaytasks.engine.chunk import ChunkSize
from delaytasks.engine.sweeper import tell_lapsed

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.app import DelayTasks
    from delaytasks.engine.runner import Report
    from delaytasks.shards import Shard

#: Rows in one step of lapsing.
LAPSE_STEP = 500
#: Clocks agree better than this; a chunk's rows are claimed after we look at the clock.
SLACK_US = 1_000_000


class _Abandon(KeyboardInterrupt):
    """Ctrl-C for the second time. The runner takes it for the end of the process, not for a task's failure."""


@click.command(epilog=EXIT_CODES)
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="Only this queue; may be given again.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after so many tasks.")
@pass_cli
def drain(cli: Cli, queues: tuple[str, ...], limit: int | None) -> None:
    """Run what is overdue, here and without a broker.

    \b
    delaytasks drain
    celery -A proj delays drain --queue mail --limit 1000

    Goes on until nothing is overdue. Workers may run at the same time. A task that fails is FAILED, which is no error
    of this command. Ctrl-C stops after the current chunk (exit code 1), a second one at once.
    """
    cli.import_processors()
    run = Drain(cli.delays, queues, limit)
    with _stopped_by_signals(run, cli), cli.guarded_stdout(), _progress(cli) as progress:
        run.until_empty(progress)
    if cli.is_json:
        print_json(run.summary())
    else:
        _say_summary(run)
    if run.is_stopped:
        raise SystemExit(1)


class Drain:
    """Runs chunk after chunk, each as large as what fits the time box, and counts what became of the tasks."""

    def __init__(self, delays: DelayTasks, queues: tuple[str, ...], limit: int | None) -> None:
        self._delays = delays
        self._queues = frozenset(queues)
        self._left = limit
        self._size = ChunkSize(delays.settings.chunk_time_box_s, delays.settings.chunk_max)
        #: Where the chunk that runs came from, and when, by the clock there.
        self._chunk = delays.shards[0], delays.clock.now_us()
        self._began_at = monotonic()
        self.is_stopped = False
        self.counts: Counter[str] = Counter()
        self.unknown_tags: set[str] = set()
        delays.events.subscribe(self._note)

    def until_empty(self, progress: Progress) -> None:
        bar, total, down = progress.add_task("", failed=0), 0, None
        with self._leases_renewed():
            for shard in self._delays.shards:
                if self.is_over:
                    break
                try:
                    total += self.overdue(shard)
                    progress.update(bar, total=total)
                    self._lapse(shard)
                    while not self.is_over and self._drain_levels(shard, progress, bar):
                        pass
                except StoreError as error:  # the tasks of the others need not wait for it
                    down = error
        if down is not None:
            raise down

    @property
    def is_over(self) -> bool:
        return self.is_stopped or self._left == 0

    def summary(self) -> dict[str, Any]:
        return {
            "ran": self.counts["task.succeeded"] + self.counts["task.failed"],
            "succeeded": self.counts["task.succeeded"],
            "failed": self.counts["task.failed"],
            "without_processor": self.counts["task.no_processor"],
            "unknown_tags": sorted(self.unknown_tags),
            "lapsed": self.counts["lapsed"],
            "seconds": round(monotonic() - self._began_at, 3),
            "is_stopped": self.is_stopped,
        }

    @staticmethod
    def overdue(shard: Shard) -> int:
        from delaytasks.store.stats import Stats

        return Stats(shard.store.database, shard.store.schema).overdue(0).tasks

    def abandon(self) -> None:
        """What runs now is given up: others may have it, as if this process had died."""
        delays, shard = self._delays, self._chunk[0]
        lapsed = shard.store.leases.release([delays.processes.name(os.getpid())], delays.settings.max_lapses)
        tell_lapsed(delays.events, lapsed)

    def _lapse(self, shard: Shard) -> None:
        delays = self._delays
        while (lapsed := shard.store.sweeps.lapse(delays.settings.max_lapses, LAPSE_STEP)).total:
            self.counts["lapsed"] += lapsed.total
            tell_lapsed(delays.events, lapsed)

    def _drain_levels(self, shard: Shard, progress: Progress, bar: Any) -> bool:
        """One pass over all that is overdue now; False if there was nothing."""
        by_queue: dict[str, list[int]] = {}
        for level in shard.store.sweeps.levels(0):
            if not self._queues or level.queue in self._queues:
                by_queue.setdefault(level.queue, []).append(level.priority)
        claimed = 0
        for queue, priorities in by_queue.items():
            is_full = True
            while is_full and not self.is_over:
                report = self._drain_chunk(shard, queue, priorities)
                is_full = report.is_full
                claimed += report.claimed
                progress.update(bar, advance=report.ran, failed=self.counts["task.failed"])
        return claimed > 0

    def _drain_chunk(self, shard: Shard, queue: str, priorities: list[int]) -> Report:
        size = self._size.rows if self._left is None else min(self._size.rows, self._left)
        self._chunk = shard, shard.clock.now_us()
        report = self._delays.runner(shard.number).drain(queue, priorities, size)
        self._size.learn(report.ran, report.seconds)
        if self._left is not None:
            self._left -= min(report.ran, self._left)
        return report

    @contextmanager
    def _leases_renewed(self) -> Iterator[None]:
        """A worker's main process renews the leases of what runs; here a thread does."""
        delays = self._delays
        name = delays.processes.name(os.getpid())

        def renew() -> float:
            (shard, began_us), asked_at = self._chunk, monotonic()
            shard.store.leases.renew([name], from_us(began_us - SLACK_US))
            delays.processes.renewals.tell(shard.number, asked_at)
            return delays.settings.lease_s / 3

        loop = Loop("leases", renew, delays.events)
        loop.start()
        try:
            yield
        finally:
            loop.stop()

    def _note(self, name: str, fields: dict[str, Any]) -> None:
        self.counts[name] += fields.get("count", 1)
        if name == "task.no_processor":
            self.unknown_tags.add(fields["tag"])


def _say_summary(run: Drain) -> None:
    found = run.summary()
    took = show_duration(found["seconds"])
    say(f"ran {count(found['ran'], 'task')} in {took}: {found['succeeded']:,} DONE, {found['failed']:,} FAILED")
    if found["lapsed"]:
        say(f"{count(found['lapsed'], 'task')} had lost their worker")
    if found["without_processor"]:
        tags = ", ".join(cell(tag) for tag in found["unknown_tags"])
        say(f"{count(found['without_processor'], 'task')} without processor, tried again later: {tags}", fg="yellow")
    if run.is_stopped:
        say("stopped; there may be more", fg="yellow")


@contextmanager
def _stopped_by_signals(run: Drain, cli: Cli) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if run.is_stopped:
            raise _Abandon
        run.is_stopped = True
        cli.note("Stopping after the current chunk; once more to stop at once.")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Abandon:
        run.abandon()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
