"""The processors of `./dev bench work`, measured in runs of some seconds."""

from __future__ import annotations

import time

import pytest

from benchmarks.notes import compute
from benchmarks.peers.catalogue import SYSTEMS
from benchmarks.peers.loads import TimedProcessor
from benchmarks.work import PEERS, one_at_a_time


@pytest.mark.parametrize(
    ("text", "shown", "burst", "steady"),
    [
        ("0", "0 ms", 5000, 60),
        ("sleep:1", "sleep 1 ms", 5000, 60),
        ("compute:20", "compute 20 ms", 500, 60),
        ("sleep:100", "sleep 100 ms", 100, 12),
    ],
)
def test_a_load_fits_its_processor(text: str, shown: str, burst: int, steady: int) -> None:
    processor = TimedProcessor.parse(text)
    assert str(processor) == shown
    assert processor.burst_size(5) == burst
    assert processor.steady_per_s == steady


@pytest.mark.parametrize("text", ["20", "wait:20", "sleep:", "sleep:-1"])
def test_an_unknown_processor_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TimedProcessor.parse(text)


def test_a_processor_that_computes_uses_its_cpu_time() -> None:
    began = time.thread_time()
    compute(0.05)
    assert 0.05 <= time.thread_time() - began < 0.06


def test_each_process_of_procrastinate_runs_one_task_at_a_time() -> None:
    for name in PEERS:
        for command in one_at_a_time(SYSTEMS[name]).worker:
            if "--concurrency" in command:
                assert name == "procrastinate"
                assert command[command.index("--concurrency") + 1] == "1"
