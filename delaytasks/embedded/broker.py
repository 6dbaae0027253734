"""Which broker a data folder has, the same one in every process."""

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

#: The scheme of our transport.
FILES = "delaytasks-files"
#: How often files are looked for; the transport's own default is one second.
POLL_S = 0.25
#: What to know where there is no Redis.
FILES_NOTE = (
    f"no redis-server or valkey-server >= {'.'.join(map(str, OLDEST_REDIS))} was found: messages go through files, "
    f"which are polled every {POLL_S:g} s, so tasks due at once start that much later; "
    "install Redis, or pip install 'delaytasks[embedded]' (x86-64 Linux, Python up to 3.12), or set CELERY_BROKER_URL"
)


class Broker(NamedTuple):
    """Which embedded broker a data folder has: the private Redis on `socket`, or files without one."""

    data_dir: Path
    socket: Path | None

    @property
    def url(self) -> str:
        return f"{FILES}://localhost//" if self.socket is None else f"redis+socket://{self.socket}"

    @property
    def options(self) -> dict[str, Any]:
        """What the transport has to be told."""
        if self.socket is not None:
            return {}
        messages, control = (
            str(self.data_dir / "broker" / name) for name in ("messages", "control")
        )
        return {
            "data_folder_in": messages,
            "data_folder_out": messages,
            "control_folder": control,
            "polling_interval": POLL_S,
        }


def use_embedded_broker(app: Any, data_dir: str) -> Broker:
    """Points a Celery app without a broker at the embedded one. Every process of a data folder gets the same."""
    TRANSPORT_ALIASES[FILES] = "delaytasks.embedded.files:Transport"
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
    _tell_at_start(broker)
    return broker


def broker_of(data_dir: str | Path) -> Broker:
    """The one that was started last in this folder, so that a producer agrees with it whatever its own PATH says;
    before any start, the one that would be started."""
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


class ToRun(NamedTuple):
    """The server that the embedded broker needs: nobody else runs one as long as it inherits `lock`."""

    server: Server
    socket: Path
    command: list[str]
    lock: int


def begin(data_dir: str | Path) -> ToRun | None:
    """From now on this process has the embedded broker of a folder, and runs a server for it; or messages go through
    files, which need none."""
    lock = hold(data_dir)
    server = find_server()
    broker = choose(data_dir, server)
    record(broker)
    if server is None or broker.socket is None:
        _begin_files(broker)
        return None
    return ToRun(
        server, broker.socket, server_command(server, broker.data_dir, broker.socket), lock
    )


def _begin_files(broker: Broker) -> None:
    """Messages of an earlier run are thrown away: most are for readers that are gone, and nobody else ever would."""
    shutil.rmtree(broker.data_dir / "broker", ignore_errors=True)


def leave(data_dir: str | Path) -> None:
    """Takes away the folder of the socket, once the server has stopped."""
    try:
        socket_path(data_dir).parent.rmdir()
    except OSError:
        pass  # there is none, or a server still uses it


def hold(data_dir: str | Path, wait_s: float = 5.0) -> int:
    """Makes this process the one that runs the embedded broker of a folder; a server that gets the returned file
    descriptor holds on for as long as it lives, even without us."""
    import fcntl  # not on Windows

    folder = Path(data_dir).absolute()
    make_folder(folder)
    tighten_data_folder(folder)
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
