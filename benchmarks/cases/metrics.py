"""What a worker's metrics cost: a burst of a worker that is scraped, and of one without a port."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks import processes
from benchmarks.cases.burst import drain, due_together
from benchmarks.figures import Target
from benchmarks.processes import BenchmarkProcess, free_port
from benchmarks.sides import Ours
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError

#: Prometheus usually scrapes every 15 to 60 seconds.
SCRAPE_S, SCRAPE_LIMIT_S = 1.0, 10.0
#: The time for scheduling the tasks of a burst.
LEAD_S = 20


class Scraped(Ours):
    """delaytasks with one worker, which serves its metrics at a port."""

    name = "delaytasks_metrics"
    port = 0

    @contextmanager
    def started(self, count: int = 1, pool: Sequence[str] = processes.POOL) -> Iterator[list[str]]:
        self.port = free_port()
        with super().started(count, pool) as names, scraped(self.port):
            yield names

    def _start_worker(self, name: str, pool: Sequence[str]) -> BenchmarkProcess:
        path, port = self.notes.path, str(self.port)
        return processes.worker(
            self.app_path, name, self.folder, path, pool, BENCH_METRICS_PORT=port
        )


@contextmanager
def scraped(port: int) -> Iterator[None]:
    """Read the metrics of a port again and again."""
    is_over, sizes = threading.Event(), list[int]()

    def scrape() -> None:
        url = f"http://127.0.0.1:{port}/metrics"
        while not is_over.wait(SCRAPE_S):
            try:
                with urllib.request.urlopen(url, timeout=SCRAPE_LIMIT_S) as answer:
                    sizes.append(len(answer.read()))
            except OSError:  # the worker is starting
                pass

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if not sizes:
        raise BenchError(f"metrics: nothing answers at port {port}")


def run(stage: CaseContext) -> None:
    count = stage.size(50_000, 5_000)
    what = f"{count:,} due together, of a worker that is scraped each {SCRAPE_S:g} s"
    target = Target("ratio", least=0.98)
    drained = stage.figure("metrics", what, "drained/s", target, against="without metrics:")
    cpu = stage.figure("metrics", "worker CPU per task", "ms", against="without metrics:")
    schedule = due_together(count, LEAD_S)
    measured, plain = stage.each(
        lambda side: drain(stage, "metrics", side, count, schedule),
        Scraped(stage.ours.folder, stage.ours.notes),
        stage.ours,
    )
    drained.add(measured.per_s, plain.per_s)
    cpu.add(measured.cost.worker_ms, plain.cost.worker_ms)
