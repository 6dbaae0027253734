"""Bulk operations that run in threads of this process, with their progress."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from delaytasks.core.bulk import BulkResult
from delaytasks.core.errors import DelayTaskError

logger = logging.getLogger(__name__)
#: Runs that are remembered, and the most that are active simultaneously.
MOST_RUNS_REMEMBERED, MOST_ACTIVE = 100, 4
State = Literal["running", "done", "stopped", "failed"]
#: Reports the counts so far. It raises `KeyboardInterrupt` if the run was asked to stop.
ReportProgress = Callable[[BulkResult], None]


@dataclass
class BulkRunState:
    """A bulk operation. The thread of the operation writes the fields, and pages read them."""

    id: str
    action: str
    actor: str
    filters: dict[str, Any]
    #: The tasks that matched when the viewer confirmed.
    expected: int
    state: State = "running"
    result: BulkResult | None = None
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> int:
        return 0 if self.result is None else self.result.changed + self.result.refused

    @property
    def matched(self) -> int:
        return self.expected if self.result is None else self.result.matched


class BulkRuns:
    """The bulk operations of this process."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called at the end of each operation."""
        self._on_end = on_end
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, BulkRunState] = OrderedDict()

    def get(self, id: str) -> BulkRunState | None:
        with self._lock:
            return self._runs.get(id)

    def start(self, run: BulkRunState, work: Callable[[ReportProgress], BulkResult]) -> bool:
        """Start the operation in a thread. Return False if too many are active."""
        with self._lock:
            if sum(each.state == "running" for each in self._runs.values()) >= MOST_ACTIVE:
                return False
            self._runs[run.id] = run
            while len(self._runs) > MOST_RUNS_REMEMBERED:
                self._runs.popitem(last=False)
        thread = threading.Thread(
            target=self._work, args=(run, work), name=f"console {run.action}", daemon=True
        )
        thread.start()
        return True

    def _work(self, run: BulkRunState, work: Callable[[ReportProgress], BulkResult]) -> None:
        state = _end_of(run, work)
        self._on_end()  # before viewers see the end, so that their next page has fresh counts
        run.state = state


def _end_of(run: BulkRunState, work: Callable[[ReportProgress], BulkResult]) -> State:
    """Do the work, and return how it ended."""

    def report(result: BulkResult) -> None:
        run.result = result
        if run.stop.is_set():
            raise KeyboardInterrupt  # the audit entry is "stopped", as after Ctrl-C

    try:
        run.result = work(report)
    except KeyboardInterrupt:
        return "stopped"
    except DelayTaskError as error:
        run.error = str(error)
        return "failed"
    except Exception as error:
        logger.exception("the bulk operation %s of the console failed", run.action)
        run.error = f"{type(error).__name__}: {error}"
        return "failed"
    return "done"


def new_run_id() -> str:
    return secrets.token_urlsafe(9)
