"""The embedded broker of a data folder, which all processes agree on."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from kombu.transport import TRANSPORT_ALIASES

from delaytasks.core.errors import ConfigError
from delaytasks.core.private_files import make_folder, tighten_data_folder, write_file
from delaytasks.embedded.server import (
    OLDEST_REDIS,
    Server,
    answers,
    check_private,
    find_server,
    server_command,
    socket_path,
)

#: The URL scheme of the transport in `files.py`.
FILES_SCHEME = "delaytasks-files"
#: The interval between two searches for files. kombu's default is one second.
FILES_POLL_S = 0.25
#: The note for a machine without Redis.
FILES_NOTE = (
    f"no redis-server or valkey-server >= {'.'.join(map(str, OLDEST_REDIS))} was found: messages "
    f"go through files, which are polled every {FILES_POLL_S:g} s, so that tasks without a delay "
    "start up to that much later; install Redis, or pip install 'delaytasks[embedded]' (x86-64 "
    "Linux, Python up to 3.12), or set CELERY_BROKER_URL"
)


class Broker(NamedTuple):
    """The embedded broker of a data folder: the private Redis on `socket`, or files without one."""

    data_dir: Path
    socket: Path | None

    @property
    def url(self) -> str:
        if self.socket is None:
            return f"{FILES_SCHEME}://localhost//"
        return f"redis+socket://{self.socket}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the transport."""
        if self.socket is not None:
            return {}
        messages, control = (
            str(self.data_dir / "broker" / name) for name in ("messages", "control")
        )
        return {
            "data_folder_in": messages,
            "data_folder_out": messages,
            "control_folder": control,
            "polling_interval": FILES_POLL_S,
        }


def use_embedded_broker(app: Any, data_dir: str) -> Broker:
    """Connect a Celery app without a broker to the embedded broker of `data_dir`."""
    TRANSPORT_ALIASES[FILES_SCHEME] = "delaytasks.embedded.files:Transport"
    broker = broker_of(data_dir)
    app.conf.broker_url = broker.url
    if broker.socket is not None:
        check_private(broker.socket.parent)
    else:
        app.conf.broker_transport_options = {
            **(app.conf.broker_transport_options or {}),
            **broker.options,
        }
    tighten_data_folder(broker.data_dir)
    _report_at_start(broker)
    return broker


def broker_of(data_dir: str | Path) -> Broker:
    """Return the broker that was started last in this folder, or the one that would be started.

    The record of the last start makes a producer with another PATH use the same broker.
    """
    return _recorded(Path(data_dir).absolute()) or choose(data_dir, find_server())


def choose(data_dir: str | Path, server: Server | None) -> Broker:
    return Broker(Path(data_dir).absolute(), None if server is None else socket_path(data_dir))


def record(broker: Broker) -> None:
    make_folder(broker.data_dir)
    text = json.dumps(
        {"data_dir": str(broker.data_dir), "socket": broker.socket and str(broker.socket)}
    )
    new = _record_path(broker.data_dir).with_suffix(".new")
    write_file(new, text)
    new.replace(_record_path(broker.data_dir))


def _recorded(data_dir: Path) -> Broker | None:
    try:
        recorded = json.loads(_record_path(data_dir).read_text())
        # A folder that was copied or moved must not use the broker of its original.
        if recorded["data_dir"] != str(data_dir):
            return None
        if recorded["socket"] is None:
            return Broker(data_dir, None)
        path = Path(recorded["socket"])
        check_private(path.parent)
        return Broker(data_dir, path)
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None


def _record_path(data_dir: Path) -> Path:
    return data_dir / "broker.json"


class ToRun(NamedTuple):
    """The server to run for the embedded broker.

    The server inherits `lock`. While it lives, no other process runs a server for the folder.
    """

    server: Server
    socket: Path
    command: list[str]
    lock: int


def begin(data_dir: str | Path) -> ToRun | None:
    """Take over the embedded broker of a folder for this process.

    Return the server to run, or None if messages go through files.
    """
    lock = lock_folder(data_dir)
    server = find_server()
    broker = choose(data_dir, server)
    record(broker)
    if server is None or broker.socket is None:
        # Most messages of an earlier run are for processes that have ended.
        shutil.rmtree(broker.data_dir / "broker", ignore_errors=True)
        return None
    return ToRun(
        server, broker.socket, server_command(server, broker.data_dir, broker.socket), lock
    )


def leave(data_dir: str | Path) -> None:
    """Remove the folder of the socket after the server has stopped."""
    try:
        socket_path(data_dir).parent.rmdir()
    except OSError:
        pass  # it does not exist, or a server still uses it


def lock_folder(data_dir: str | Path, wait_s: float = 5.0) -> int:
    """Lock the embedded broker of a folder, and return the file descriptor of the lock.

    A server that inherits the descriptor keeps the lock while it lives, even after this process has
    ended. Raises `ConfigError` if another process keeps the lock for `wait_s`.
    """
    import fcntl  # not on Windows

    folder = Path(data_dir).absolute()
    make_folder(folder)
    tighten_data_folder(folder)
    lock = os.open(folder / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s  # the server of a killed process may still be saving
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ConfigError(
                    f"the embedded broker of {folder} runs already: stop that `delaytasks up` (or "
                    "`honcho start`), or set DELAYTASKS_DATA_DIR to another folder"
                ) from None
            time.sleep(0.05)


def _report_at_start(broker: Broker) -> None:
    """Make a worker or beat print at start why its broker may be unavailable."""
    from celery import signals

    def report(**_: Any) -> None:
        if broker.socket is None:
            sys.stderr.write(f"delaytasks: {FILES_NOTE}\n")
        elif not answers(broker.socket):
            sys.stderr.write(
                f"delaytasks: the embedded broker at {broker.socket} does not answer; start it by "
                "`delaytasks up` or `python -m delaytasks.cli.embedded` in this folder, or set "
                "CELERY_BROKER_URL\n"
            )

    for starting in (signals.celeryd_init, signals.beat_init):
        starting.connect(report, weak=False, dispatch_uid="delaytasks.embedded")
