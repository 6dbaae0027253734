"""What servers share: probes, values that are kept, and files of users and keys.

The servers are the console, the HTTP API and the exporter of metrics.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import ConfigError
from delaytasks.operate.health import HealthChecks
from delaytasks.settings import make_folder, write_file

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

T = TypeVar("T")
#: The name, in the WSGI environment, of a function that the integration with a web framework sets.
#: It returns a context manager, whose value is the request of the framework.
HOST_REQUEST = "delaytasks.host_request"


# -- URLs for the probes of a server: whether it lives, and whether it is ready for requests ------


#: The names of the URLs in an app.
ENDPOINTS = ("health_live", "health_ready")
#: Anyone may call these URLs, so the database is asked once in this time.
ASK_AGAIN_S = 1.0
#: The time that the database has to answer.
READY_ANSWER_S = 1.0


def add_probes(app: Any, delays: DelayTasks) -> None:
    """Add the URLs to a Flask application.

    They answer without an API key or a login, and therefore without the texts of errors.
    """
    cache = SharedCache()

    def ask() -> Mapping[str, bool]:
        """Return whether each check succeeds. Callers need the database, and no broker."""
        checks = HealthChecks(delays._runtime, "api", timeout_s=READY_ANSWER_S)
        return {check.name: check.is_ok for check in checks.ready()}

    def ready() -> Any:
        # An answer that took long is no older than others.
        return _answer(cache.get("ready", ASK_AGAIN_S, ask, longest_s=ASK_AGAIN_S))

    app.add_url_rule("/health/live", "health_live", lambda: _answer({}))
    app.add_url_rule("/health/ready", "health_ready", ready)


def _answer(checks: Mapping[str, bool]) -> tuple[str, int, dict[str, str]]:
    """Return the text, the status and the headers."""
    is_healthy = all(checks.values())
    text = json.dumps({"is_healthy": is_healthy, "checks": checks})
    return text, 200 if is_healthy else 503, {"Content-Type": "application/json"}


# -- Values that several threads read, so that one of them reads the database ----------------------


#: Values that are kept. The ones that were read longest ago are dropped first.
MOST_VALUES = 200
#: A value is kept 20 times as long as its read took, so that its reads take 5 % of the time.
KEPT_PER_READ = 20.0
#: But by default not longer than this.
LONGEST_KEPT_S = 60.0
#: Seconds for which the waiting threads get the error of a read instead of repeating it.
ERROR_KEPT_S = 4.0


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.until = float("-inf")
        self.value: Any = None
        self.error: Exception | None = None


class SharedCache:
    """Keeps each value for some seconds. One thread reads it anew while the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()

    def get(
        self,
        key: Hashable,
        kept_s: float,
        read: Callable[[], T],
        *,
        longest_s: float = LONGEST_KEPT_S,
    ) -> T:
        """Return the value of `key`; call `read` if it is older than `kept_s` seconds.

        A value whose read took long is kept for longer, so that a slow database is not read all the
        time. An error of `read` is kept too, and raised in all threads that ask meanwhile.

        Parameters
        ----------
        longest_s
            A value is kept `KEPT_PER_READ` times as long as its read took, but not longer than
            this.
        """
        slot = self._slot(key)
        with slot.lock:
            if monotonic() >= slot.until:
                began, slot.error = monotonic(), None
                try:
                    slot.value = read()
                except Exception as error:
                    slot.value, slot.error = None, error
                    slot.until = monotonic() + min(kept_s, ERROR_KEPT_S)
                    raise
                ended = monotonic()
                slow_s = min(KEPT_PER_READ * (ended - began), longest_s)
                slot.until = ended + max(kept_s, slow_s)
            if slot.error is not None:
                raise slot.error.with_traceback(None)  # each raise would make it longer
            value: T = slot.value
            return value

    def _slot(self, key: Hashable) -> _Slot:
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > MOST_VALUES:
                self._slots.popitem(last=False)
            return slot

    def forget(self) -> None:
        """Drop all values, after an action whose effect the viewer wants to see."""
        with self._lock:
            self._slots.clear()


# -- A JSON file that only its owner can read, and that is read again when it changes -------------


class EntryFile(Generic[T]):
    """A JSON file of entries by name.

    Parameters
    ----------
    path
        The file. It is made with the first entry.
    field
        The name of the entries in the document.
    parse
        Makes the content from the entries. Its errors are reported with the path.
    purpose
        Names the content in errors, such as "console users".
    """

    def __init__(
        self, path: Path, field: str, parse: Callable[[Mapping[str, Any]], T], purpose: str
    ) -> None:
        self.path = path
        self._field, self._parse, self._purpose = field, parse, purpose
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._read: tuple[Mapping[str, Any], T] | None = None

    @property
    def entries(self) -> Mapping[str, Any]:
        """The entry of each name; none if there is no file yet."""
        return self._current()[0]

    def content(self) -> T:
        """Return what `parse` has made of the entries."""
        return self._current()[1]

    def remove(self, name: str) -> bool:
        """Remove an entry; return False if there is none of this name."""
        entries = dict(self.entries)
        is_known = entries.pop(name, None) is not None
        if is_known:
            self.write(entries)
        return is_known

    def write(self, entries: Mapping[str, Any]) -> None:
        """Replace the file. Readers see the old file or the new one."""
        make_folder(self.path.parent)
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        write_file(new, json.dumps({self._field: entries}, indent=2) + "\n")
        os.replace(new, self.path)

    def _current(self) -> tuple[Mapping[str, Any], T]:
        """Return entries and content. The file is read only if it has changed since then."""
        with self._lock:
            try:
                found = os.stat(self.path)
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
                if self._read is None or self._stamp != stamp:
                    entries = json.loads(self.path.read_text(encoding="utf-8"))[self._field]
                    self._read, self._stamp = (entries, self._parse(entries)), stamp
            except FileNotFoundError:
                return {}, self._parse({})
            except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
                problem = f"{self.path} is no file of {self._purpose}: {error}"
                raise ConfigError(problem) from error
            return self._read
