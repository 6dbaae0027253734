"""Folders and files that only their owner can read."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from delaytasks.model.errors import ConfigError

FOLDER_MODE, FILE_MODE = 0o700, 0o600
#: Beginnings of the names of our files in a data folder, including the files that SQLite (-wal,
#: -shm, -journal) and beat make.
_OURS = ("delays.sqlite3", "broker", "celerybeat-schedule")


def make_folder(folder: Path) -> None:
    """Make `folder` if it is missing, and give only its owner access."""
    for missing in reversed([each for each in folder.absolute().parents if not each.exists()]):
        missing.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    tighten_folder(folder)


def make_file(path: Path) -> None:
    """Make an empty file unless it exists. Other users never have access, not even briefly."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))


def write_file(path: Path, text: str) -> None:
    """Write a new file that only its owner can read."""
    make_file(path)
    path.write_text(text, encoding="utf-8")


def tighten_data_folder(folder: Path) -> None:
    """Take other users' access away from a data folder that exists, and from our files in it."""
    tighten_folder(folder)
    try:
        found = [entry for entry in folder.iterdir() if entry.name.startswith(_OURS)]
    except OSError:
        return  # the folder is missing, or belongs to another user
    for path in found:
        _tighten(path)


def tighten_folder(folder: Path) -> None:
    """Take other users' access away, except from shared folders.

    Shared folders are the current folder, the home folder, their parents, and folders like /tmp.
    """
    own, home, folder = Path.cwd(), Path.home(), folder.absolute()
    if folder not in (own, *own.parents, home, *home.parents):
        _tighten(folder)


def _tighten(path: Path) -> None:
    if os.name != "posix":
        return
    try:
        found = path.stat()
        is_shared = found.st_mode & stat.S_ISVTX
        others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if found.st_uid == os.geteuid() and others and not is_shared:
            path.chmod(stat.S_IMODE(found.st_mode) & ~others)
    except OSError:
        pass  # the file was just deleted, or its file system has no modes


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
