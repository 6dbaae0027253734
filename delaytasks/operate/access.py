"""What the console and the HTTP API admit callers by: limits of tries, and files of keys."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import ConfigError
from delaytasks.settings import make_folder, write_file


class TokenBuckets:
    """Lets each key act `most` times, and from then on `per_s` times a second.

    The counts are in the memory of this process.
    """

    #: The keys that are remembered. Those that acted longest ago are forgotten first.
    MOST_KEYS = 10_000

    def __init__(self, per_s: float, most: float, clock: Callable[[], float] = monotonic) -> None:
        self._per_s = per_s
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        #: The tokens of each key, and the time at which they were counted.
        self._buckets: dict[Hashable, tuple[float, float]] = {}

    def take(self, key: Hashable, tokens: int = 1) -> float:
        """Take tokens if there is one. Return 0, or the seconds until there is one."""
        with self._lock:
            now = self._clock()
            found, counted_at = self._buckets.pop(key, (self._most, now))
            found = min(found + (now - counted_at) * self._per_s, self._most)
            is_allowed = found >= 1
            self._buckets[key] = (found - tokens * is_allowed, now)
            if len(self._buckets) > self.MOST_KEYS:
                del self._buckets[next(iter(self._buckets))]
            return 0.0 if is_allowed else (1 - found) / self._per_s

    def forget(self, key: Hashable) -> None:
        with self._lock:
            self._buckets.pop(key, None)


# -- A JSON file that only its owner can read, and that is read again when it changes -------------


Content = TypeVar("Content")


class WatchedFile(Generic[Content]):
    """A JSON file.

    Parameters
    ----------
    path
        The file.
    missing
        The document if there is no file.
    parse
        Makes the content from the document. Its errors are reported with the path.
    purpose
        Names the content in errors, such as "console users".
    """

    def __init__(
        self, path: Path, missing: Any, parse: Callable[[Any], Content], purpose: str
    ) -> None:
        self._path = path
        self._parse = parse
        self._purpose = purpose
        self._lock = threading.Lock()
        self._missing = parse(missing)
        self._read: tuple[tuple[int, int, int], Content] | None = None

    def read(self) -> Content:
        """Return the content. The file is parsed only if it has changed since the last call."""
        with self._lock:
            try:
                found = os.stat(self._path)
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
                if self._read is None or self._read[0] != stamp:
                    self._read = stamp, self._parsed()
            except FileNotFoundError:
                return self._missing
            return self._read[1]

    def write(self, document: Any) -> None:
        """Replace the file. Readers see the old file or the new one."""
        make_folder(self._path.parent)
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        write_file(new, json.dumps(document, indent=2) + "\n")
        os.replace(new, self._path)

    def _parsed(self) -> Content:
        try:
            return self._parse(json.loads(self._path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{self._path} is no file of {self._purpose}: {error}") from error
