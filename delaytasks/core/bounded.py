"""Calls that may have to wait for a network, for callers who must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T], at_exit: Callable[[], T] | None = None) -> T:
    """What `work` answers, or `TimeoutError` when that takes longer than `limit_s`: it is done in a thread, which ends
    it also when nobody waits any more. When no thread can be started it, or `at_exit`, is done here."""
    answers: SimpleQueue[Future[T]] = SimpleQueue()

    def run() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        answers.put(answer)

    try:
        threading.Thread(target=run, name="delaytasks-bounded", daemon=True).start()
    except RuntimeError:  # the interpreter is about to end
        return (at_exit or work)()
    try:
        return answers.get(timeout=max(limit_s, 0.001)).result()
    except Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
