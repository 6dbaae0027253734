"""A bounded pool of threads for blocking calls of an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from delaytasks.core.forks import reset_in_child

T = TypeVar("T")


class ThreadPool:
    """Runs up to `size` calls simultaneously. Further calls wait, in their order.

    The first call starts the first thread. A normal end of the process waits for all calls.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Forget the threads of the parent process."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread, with the context variables of the caller."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._size, self._name)
            return self._executor.submit(copy_context().run, call)

    def close(self) -> None:
        """Wait for all calls. A later call starts threads again."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
