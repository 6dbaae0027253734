"""Send single callbacks, as a worker does."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask, DelayTasks
from delaytasks.callbacks.sending import Callback, Guard, HttpCallbacks
from delaytasks.db import migrations
from delaytasks.model.clock import Clock
from delaytasks.model.inputs import CALLBACK
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings
from tests.waiting import within
from tests.world.recording import delays_on, record

SECRETS = ["whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"a", b"b")]
#: Each test ends within this many seconds; the limits under test are much shorter.
PATIENCE_S = 20


#: Returns the addresses of a host.
Names = Callable[[str], list[str]]


class Caller:
    """Send callbacks as a process does, with a name resolution of the test's own."""

    def __init__(self, names: Names | None = None, ca_file: str = "", **settings: Any) -> None:
        """`settings` are those of callbacks, and the limits `connect_s` and `read_s`."""
        usual = {"allow": "127.0.0.1", "timeout": 1, "connect_s": 2, "read_s": 0.5}
        given = {
            f"{'_' * name.endswith('_s')}callback_{name}": value
            for name, value in {**usual, **settings}.items()
        }
        self.settings = load_settings({}, {}, **given)
        self._ca_file = ca_file
        self.looked_up: list[str] = []

        def resolve(host: str, port: int) -> list[str]:
            self.looked_up.append(host)
            return names(host) if names is not None else ["127.0.0.1"]

        guard = Guard(self.settings.callback_allow, resolve)
        self.http = HttpCallbacks(self.settings, guard, Clock())

    def post(self, url: str, body: Any = None, attempt: int = 1, **more: Any) -> Any:
        """Return the outcome, or raise `TimeoutError` if the callback does not end in time."""
        call = partial(self.http, Callback(url, body, **more), task(attempt))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", self._ca_file)
            return within(PATIENCE_S, call)


def task(attempt: int = 1, **more: Any) -> DelayedTask:
    return DelayedTask(42, CALLBACK, "{}", datetime.now(timezone.utc), runs=attempt, **more)


HEAD = b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def listener() -> Iterator[int]:
    """Yield the port of a server that accepts connections, and neither reads nor writes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[DelayTasks]:
    settings = {"callback_allow": "127.0.0.1", "callback_secrets": SECRETS[0]}
    made = delays_on(f"sqlite:///{tmp_path / 'test.sqlite3'}", **settings)
    migrations.upgrade(runtime_of(made).store.database)
    record(made)
    yield made
    made.close()
