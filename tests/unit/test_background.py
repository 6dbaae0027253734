"""Entries are armed in batches by a thread, across forks and failures."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import closing
from types import SimpleNamespace

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from tests.waiting import in_child, wait_until
from tests.world import Entry
from tests.world.broker import ArmingThread, SlowBroker, arms_in_background
from tests.world.recording import delays_on

entry = ArmingThread.entry


@pytest.fixture
def timer() -> Iterator[ArmingThread]:
    with closing(ArmingThread()) as timer:
        yield timer


@pytest.fixture
def patient(timer: ArmingThread, monkeypatch: pytest.MonkeyPatch) -> ArmingThread:
    """A timer whose entries wait for others for up to 30 seconds."""
    timer.change(monkeypatch, arm_delay_s=30.0)
    return timer


def test_a_task_that_is_due_now_is_sent_immediately(patient: ArmingThread) -> None:
    patient.arm([entry(1, 60)])
    patient.arm([entry(2, 0)])
    wait_until(lambda: patient.broker.ids == [1, 2], 10, "both, at once")


def test_memory_is_bounded_in_outages(timer: ArmingThread, monkeypatch: pytest.MonkeyPatch) -> None:
    timer.change(monkeypatch, max_waiting_entries=10)
    timer.broker.gate.clear()
    timer.arm([entry(0, 0)])
    wait_until(lambda: timer.broker.calls, 10, "the first call")
    answers = [timer.arm([entry(id)]) for id in range(1, 100)]
    assert answers == sorted(answers, reverse=True)
    assert 5 <= sum(answers) <= 12
    timer.broker.gate.set()
    assert timer.flush(5)
    assert len(timer.broker.ids) <= 12
    assert timer.arm([entry(100)])
    timer.close()
    assert timer.broker.ids[-1] == 100
    assert timer.arm([entry(101, 0)])
    wait_until(lambda: 101 in timer.broker.ids, 5, "an entry that comes after the close")


class Printer(SlowBroker):
    def arm(self, entries: Iterable[Entry]) -> bool:
        print(*(one.id for one in entries), flush=True)
        return True


def arm_last() -> None:
    ArmingThread(Printer()).arm([entry(2)])


BEGIN = """
import atexit, multiprocessing, os
from tests.unit.test_background import ArmingThread, Printer, arm_last, entry
timer = ArmingThread(Printer())
"""
USE, REGISTER = "timer.arm([entry(1)])", "atexit.register(lambda: timer.arm([entry(2)]))"
#: As with `gunicorn --preload -k gevent`, if the application schedules while it is imported.
GEVENT = """
from gevent import monkey
timer.arm([entry(1)])
timer.flush()
pid = os.fork()
if pid == 0:
    monkey.patch_all()
    timer.arm([entry(2)])
    os._exit(not timer.flush())
os.waitpid(pid, 0)
"""
CHILD = """
child = multiprocessing.get_context({!r}).Process(target=arm_last)
child.start()
child.join()
timer.arm([entry(1)])
"""
#: A handler that was registered before the first call runs after the timer's own.
SCRIPTS = {"before": f"{REGISTER}\n{USE}", "after": f"{USE}\n{REGISTER}", "gevent": GEVENT}
SCRIPTS |= {method: CHILD.format(method) for method in ("fork", "spawn")}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS)
def test_tasks_of_exit_handlers_and_of_children_are_sent(code: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert run.stderr == "" or code is GEVENT
    assert sorted(run.stdout.split()) == ["1", "2"]


UWSGI = [({"processes": b"4"}, False), ({"enable-threads": True}, True), ({"threads": b"2"}, True)]


@pytest.mark.parametrize(("options", "expected"), UWSGI)
def test_uwsgi_without_threads_is_recognized(
    options: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(opt=options))
    with closing(delays_on("sqlite://")) as delays:
        assert arms_in_background(delays) is expected


def test_after_a_failure_rows_do_not_count_as_armed(
    timer: ArmingThread, caplog: pytest.LogCaptureFixture
) -> None:
    timer.broker.fails = 1
    assert (timer.sender.arm([entry(1)]), timer.is_up) == (False, False), "a sweep marks nothing"
    assert (timer.sender.arm([entry(2)]), timer.is_up) == (True, True)
    assert "arming 1 tasks failed" in caplog.text
    assert "OSError: as asked" in caplog.text


def die(*_: object) -> bool:
    raise SystemExit


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_send_without_threads_and_replace_dead_ones(
    timer: ArmingThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert timer.arm([entry(1)])
        assert timer.broker.ids == [1]
    with monkeypatch.context() as patched:
        patched.setattr(timer.broker, "arm", die)
        timer.arm([entry(2, 0)])
        wait_until(lambda: timer.has_died, 5, "the thread to die")
    assert timer.arm([entry(3)])
    assert timer.flush(5)
    assert timer.broker.ids == [1, 3]


def test_a_forked_child_sends_its_own_entries_and_none_of_its_parent(
    patient: ArmingThread, pool: Executor
) -> None:
    patient.arm([entry(1, 100)])

    def work() -> bool:
        patient.arm([entry(2, 100)])
        return patient.flush(5) and patient.broker.ids == [2]

    assert in_child(work)
    assert patient.broker.calls == []
    has_lock, goes_on = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with patient.locked():
            has_lock.set()
            assert goes_on.wait(10)

    holding = pool.submit(hold_lock)
    assert has_lock.wait(5)
    assert in_child(work)
    goes_on.set()
    holding.result(5)
    assert patient.flush(5)
    assert patient.broker.ids == [1]


def test_a_time_limit_of_the_caller_ends_its_wait_alone(timer: ArmingThread) -> None:
    def strike(*_: object) -> None:
        raise SoftTimeLimitExceeded(5)

    timer.broker.gate.clear()
    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            timer.arm([entry(id) for id in range(101)])
    finally:
        signal.signal(signal.SIGALRM, before)
    timer.broker.gate.set()
    assert timer.flush(5)
    assert (len(timer.broker.ids), timer.is_up) == (101, True)
