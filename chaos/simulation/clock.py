"""The simulated clock: it replaces the module `time` for the code, and `strftime` for SQLite."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import event

from delaytasks.db.store import Store
from delaytasks.model.clock import from_us

#: Noon of a day in 2030.
START_US = int(datetime(2030, 5, 1, 12, tzinfo=timezone.utc).timestamp()) * 1_000_000


class Times:
    """Replaces the module `time` in the modules of delaytasks."""

    def __init__(self) -> None:
        self.now_us = START_US
        #: How far the clock of the calling host is ahead of the database's.
        self.skew_us: Callable[[], int] = lambda: 0
        self.sleep: Callable[[float], None] = self.advance

    @property
    def database_us(self) -> int:
        """The time in whole milliseconds, SQLite's precision.

        A reading just before a change of a row must not be later than the change.
        """
        return self.now_us // 1000 * 1000

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)

    def monotonic(self) -> float:
        return (self.now_us - START_US) / 1e6

    def clock_gettime(self, _clock: int) -> float:
        return self.monotonic()

    def time_ns(self) -> int:
        return (self.now_us + self.skew_us()) * 1000

    def serve(self, store: Store) -> None:
        """Make the database use this clock."""
        for engine in (store.database.auto, store.database.tx):
            event.listen(engine, "connect", self._connected)
        store.database.dispose()

    def _connected(self, connection: Any, _record: Any) -> None:
        connection.create_function("strftime", -1, lambda *words: self._strftime(*words))

    def _strftime(self, _form: str, _now: str, later: str = "0 seconds") -> str:
        """Evaluate `strftime` as the statements of delaytasks call it."""
        instant = from_us(self.database_us + round(float(later.split()[0]) * 1e3) * 1000)
        return f"{instant:%Y-%m-%d %H:%M:%S.%f}"


@contextmanager
def installed(times: Times, globals_of: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Replace `time` in all modules of delaytasks, and other globals in the modules of
    `globals_of`.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("delaytasks."):
            found = vars(module)
            others = {"time": times} if found.get("time") is time else {}
            for key, value in {**others, **globals_of.get(name, {})}.items():
                replaced.append((found, key, found[key]))
                found[key] = value
    try:
        yield
    finally:
        for found, key, value in replaced:
            found[key] = value
