"""A private RabbitMQ that tests can kill, empty, restart and alarm.

The shared one has other users.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kombu import Connection

from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until

#: The original scripts; a distribution's wrapper would run them as another user.
_PLACES = "/usr/lib/rabbitmq/bin"


class RabbitServer:
    """A node with a private name, port mapper and folder, without plugins.

    `configuration` contains lines of rabbitmq.conf.
    """

    name = "RabbitMQ"
    mapper_port: int

    def __init__(
        self, folder: Path, *configuration: str, cluster_of: RabbitServer | None = None
    ) -> None:
        """Start a node. With `cluster_of`, it joins the cluster of that node."""
        self._folder = folder
        self._programs = {
            name: _program(name) for name in ("rabbitmq-server", "rabbitmqctl", "epmd")
        }
        self._port = free_port()
        mapper = cluster_of.mapper_port if cluster_of else free_port()
        self.mapper_port = mapper
        self.node = f"test{self._port}@localhost"
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}//"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("".join(f"{line}\n" for line in configuration))
        self._environment = {
            **os.environ,
            "HOME": str(folder),  # contains the cookie that nodes share
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none.sh"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        }
        self._mapper: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if cluster_of is None:
            self._mapper = self._popen(
                [self._programs["epmd"], "-port", str(mapper), "-address", "127.0.0.1"]
            )
        else:
            shutil.copy2(cluster_of._folder / ".erlang.cookie", folder)  # the cookie
        self.start()
        if cluster_of is not None:
            for words in (
                ["stop_app"],
                ["reset"],
                ["join_cluster", cluster_of.node],
                ["start_app"],
            ):
                self.ctl(*words)
            wait_until(self._answers, 60, "the node to be one of the cluster", every_s=0.1)

    def start(self, is_empty: bool = False) -> None:
        if is_empty:
            shutil.rmtree(self._folder / "mnesia", ignore_errors=True)
        self._process = self._popen([self._programs["rabbitmq-server"]])
        try:
            wait_until(self._answers, 60, "the test's RabbitMQ", every_s=0.1)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}; its log: {self.log()[-800:]}") from None

    def crash(self) -> None:
        """Kill the node, as a power failure does."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def stop(self) -> None:
        self.crash()
        if self._mapper is not None:
            _end(self._mapper)

    def empty(self, queues: Iterable[str]) -> None:
        with Connection(self.url, connect_timeout=3) as connection:
            for name in queues:
                try:
                    connection.channel().queue_purge(name)
                except connection.channel_errors:
                    pass  # the queue does not exist yet

    def close_connections(self) -> None:
        self.ctl("close_all_connections", "the test requires it")

    def alarm(self, is_on: bool) -> None:
        """Set the memory alarm, which blocks publishers."""
        limit = "{resource_limit, memory, node()}"
        change = f"set_alarm({{{limit}, []}})" if is_on else f"clear_alarm({limit})"
        self.ctl("eval", f"rabbit_alarm:{change}.")

    def hurry(self, consumer_timeout_s: float) -> None:
        """Close the channel of a consumer that acknowledges later than this."""
        for name, ms in (
            ("consumer_timeout", int(consumer_timeout_s * 1000)),
            ("channel_tick_interval", 1000),
        ):
            self.ctl("eval", f"application:set_env(rabbit, {name}, {ms}).")

    def ctl(self, *words: str) -> str:
        command = [self._programs["rabbitmqctl"], "--quiet", *words]
        ended = subprocess.run(
            command,
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return ended.stdout

    def log(self) -> str:
        return (self._folder / "rabbitmq.log").read_text(errors="replace")

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / "rabbitmq.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError("RabbitMQ ended")
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
            with Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
        except Exception:  # it refuses, or is not ready for logins
            return False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _program(name: str) -> str:
    found = (
        shutil.which(name, path=_PLACES)
        or shutil.which(name)
        or shutil.which(name, path="/usr/sbin")
    )
    if found is None:
        raise MissingServiceError(f"no {name} on this machine")
    return found
