"""Time that is set: for the code, which asks the module `time`, and for SQLite, whose `strftime` is replaced."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import event

from delaytasks.core.clock import from_us
from delaytasks.storage.store import Store

#: Noon of a day in 2030.
START_US = int(datetime(2030, 5, 1, 12, tzinfo=timezone.utc).timestamp()) * 1_000_000


class Times:
    """Stands where modules of delaytasks have `time`."""

    def __init__(self) -> None:
        self.now_us = START_US
        #: How far the clock of the host that asks is ahead of the database's.
        self.skew_us: Callable[[], int] = lambda: 0
        self.sleep: Callable[[float], None] = self.advance

    @property
    def database_us(self) -> int:
        """In whole milliseconds, as SQLite has it: what was just before a change of a row must not seem to be later."""
        return self.now_us // 1000 * 1000

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)

    def monotonic(self) -> float:
        return (self.now_us - START_US) / 1e6

    def time_ns(self) -> int:
        return (self.now_us + self.skew_us()) * 1000

    def serve(self, store: Store) -> None:
        """From now on the database has this time."""
        for engine in (store.database.auto, store.database.tx):
            event.listen(engine, "connect", self._connected)
        store.database.dispose()

    def _connected(self, connection: Any, _record: Any) -> None:
        connection.create_function("strftime", -1, lambda *words: self._strftime(*words))

    def _strftime(self, _form: str, _now: str, later: str = "0 seconds") -> str:
        """As our statements ask for it."""
        instant = from_us(self.database_us + round(float(later.split()[0]) * 1e3) * 1000)
        return f"{instant:%Y-%m-%d %H:%M:%S.%f}"


@contextmanager
def installed(times: Times, globals_of: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """In all modules of delaytasks, and other globals in some of them by their names."""
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
