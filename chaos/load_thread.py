"""A thread that puts load on the system."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable


class LoadThread:
    """Calls `run`. An error there, or a call that hangs, fails the run instead of reducing the load
    silently.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended, at most for `seconds`."""
        self._thread.join(seconds)

    def stop(self, seconds: float) -> None:
        """Wait for the thread, which was asked to stop.

        Raise its error, or one with its stack if it has not ended.
        """
        self.wait(seconds)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            frame = sys._current_frames()[self._thread.ident or 0]
            stack = "".join(traceback.format_stack(frame))
            raise AssertionError(f"{self._thread.name} hangs in a call:\n{stack}")
