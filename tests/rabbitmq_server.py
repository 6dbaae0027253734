"""A RabbitMQ of a test's own, which may be stopped and have alarms: the shared one belongs to others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from kombu import Connection

from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until

#: Debian's programs on the PATH change the user; these do not.
_PLACES = ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin")


class RabbitServer:
    """On ports that stay its own. Its queues outlive a restart if they are durable."""

    def __init__(self, folder: Path) -> None:
        self._programs = _programs()
        self._port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}//"
        self._log = folder / "rabbitmq.log"
        self._environment = {
            **os.environ,
            "HOME": str(folder),  # the cookie lies there
            "RABBITMQ_NODENAME": f"dt{self._port}@localhost",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "ERL_EPMD_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("loopback_users = none\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "rabbitmq-server"], env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self.answers, 60, "the test's RabbitMQ", every_s=0.2)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}; its log: {self._log.read_text(errors='replace')[-800:]}") from None

    def answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=2) as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
        except Exception:
            return False
        return True

    def ctl(self, *words: str) -> str:
        command = [self._programs / "rabbitmqctl", "--quiet", *words]
        return subprocess.run(command, env=self._environment, check=True, capture_output=True, text=True).stdout

    def alarm(self, is_on: bool) -> None:
        """As if it had no memory left: it takes nothing from those who publish."""
        limit = "{resource_limit, memory, node()}"
        change = f"set_alarm({{{limit}, []}})" if is_on else f"clear_alarm({limit})"
        self.ctl("eval", f"rabbit_alarm:{change}.")

    def stop(self) -> None:
        """At once, as if the machine had died; with what it has started in its session."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
        # The server has started it, as a daemon of its own; it goes once it knows of no node.
        end = [shutil.which("epmd") or "epmd", "-kill"]

        def has_ended() -> bool:
            said = subprocess.run(end, env=self._environment, check=False, capture_output=True, text=True)
            return "living nodes" not in said.stdout + said.stderr

        wait_until(has_ended, 10, "the test's epmd to end", every_s=0.1)


def _programs() -> Path:
    found = shutil.which("rabbitmq-server")
    folders = [Path(place) for place in _PLACES] + ([Path(found).parent] if found else [])
    for folder in folders:
        if (folder / "rabbitmq-server").exists() and (folder / "rabbitmqctl").exists():
            return folder
    raise MissingServiceError("there is no rabbitmq-server")
