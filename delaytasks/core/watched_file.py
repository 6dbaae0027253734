"""A JSON file that only its owner can read, and that is read again when it changes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from delaytasks.core.errors import ConfigError
from delaytasks.core.private_files import make_folder, write_file

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
