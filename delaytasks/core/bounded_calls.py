"""Calls that may wait for a network, for callers that must not wait."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from delaytasks.core.clock import monotonic

T = TypeVar("T")

#: Seconds, in total, for which an ending process waits for unfinished work. Without this wait, the
#: first message of a short-lived process would be lost if the broker answers slowly.
EXIT_S = 5.0
_unfinished: set[threading.Thread] = set()


def in_background(work: Callable[[], object], name: str, is_kept: bool = True) -> bool:
    """Run `work` in a new thread, for which an ending process waits if `is_kept`.

    Return False if no thread can be started, because the interpreter is ending.
    """

    def run() -> None:
        try:
            work()
        finally:
            _unfinished.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=f"delaytasks-{name}", daemon=True)
    if is_kept:
        _unfinished.add(thread)
    try:
        thread.start()
    except RuntimeError:
        _unfinished.discard(thread)
        return False
    return True


def within(limit_s: float, work: Callable[[], T], is_kept: bool = False) -> T:
    """Return what `work` returns, or raise `TimeoutError` if that takes longer than `limit_s`.

    A thread does the work, and continues after the timeout. With `is_kept`, an ending process waits
    for the thread. If no thread can be started, the caller does the work.
    """
    answers: SimpleQueue[Future[T]] = SimpleQueue()

    def run() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        answers.put(answer)

    if not in_background(run, "bounded", is_kept):
        return work()
    try:
        return answers.get(timeout=max(limit_s, 0.001)).result()
    except Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None


def all_within(limit_s: float, works: Sequence[Callable[[], object]]) -> bool:
    """Do all `works` at the same time, and return whether all have ended within `limit_s`.

    Threads do the work, and continue after the limit. If no thread can be started, the caller does
    the work.
    """
    ends: SimpleQueue[None] = SimpleQueue()

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            ends.put(None)

    until = monotonic() + limit_s
    for work in works:
        if not in_background(partial(run, work), "bounded", is_kept=False):
            run(work)
    try:
        for _ in works:
            ends.get(timeout=max(until - monotonic(), 0.001))
    except Empty:
        return False
    return True


@atexit.register
def wait_for_unfinished() -> None:
    until = monotonic() + EXIT_S
    for thread in list(_unfinished):
        if thread is not threading.current_thread():
            thread.join(max(until - monotonic(), 0))
