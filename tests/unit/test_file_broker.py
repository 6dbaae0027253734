"""A machine without services sends messages through files that other users cannot read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from delaytasks import file_broker
from delaytasks.attachment import file_broker_url


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Any]:
    with Connection(file_broker_url(str(tmp_path))) as connection:
        yield connection.channel()


@pytest.mark.parametrize("where", ["environment", "celeryconfig", ""])
def test_the_standalone_app_uses_files_unless_a_broker_is_given(where: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop("CELERY_BROKER_URL", None)
    if where == "environment":
        environ["CELERY_BROKER_URL"] = "redis://given:1/0"
    elif where:
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
    files = file_broker_url(str(tmp_path / ".delaytasks"))
    assert said.strip() == ("redis://given:1/0" if where else files)
    assert not (tmp_path / ".delaytasks").exists()


def test_a_message_is_not_seen_before_it_is_whole(
    channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slowly(path: Path, text: str) -> None:
        path.write_text(text[: len(text) // 2])
        with pytest.raises(Empty):
            channel._get("q")
        path.write_text(text)

    monkeypatch.setattr(file_broker, "write_file", write_slowly)
    channel._put("q", {"body": "whole"})
    assert channel._get("q") == {"body": "whole"}


def test_queues_are_bound_and_unbound_one_by_one(channel: Any) -> None:
    for queue in ("first", "second", "second"):
        channel._queue_bind("news/..", "", None, queue)
    assert {row.queue for row in channel.get_table("news/..")} == {"first", "second"}
    channel._put("first", {})
    channel._delete("first", "news/..", "", None, "first")
    assert [row.queue for row in channel.get_table("news/..")] == ["second"]
    assert channel._size("first") == 0


def test_a_process_makes_its_bindings_again_after_the_folder_was_deleted(
    channel: Any, tmp_path: Path
) -> None:
    channel._queue_bind("news", "", None, "mine")
    shutil.rmtree(tmp_path / "broker")
    with Connection(file_broker_url(str(tmp_path))) as other:
        other.channel()._put("other", {})  # makes the folder first
    with pytest.raises(Empty):
        channel._get("mine")
    assert [row.queue for row in channel.get_table("news")] == ["mine"]


#: This program prints the messages that it receives until the message is "stop".
READER = """
import sys
from kombu import Connection
import delaytasks
with Connection(sys.argv[1], transport_options={"polling_interval": 0.001}) as connection:
    with connection.SimpleQueue("q") as queue:
        while (text := queue.get(timeout=30).payload) != "stop":
            print(text)
"""


def test_each_message_is_read_by_one_of_many_readers(tmp_path: Path) -> None:
    url = file_broker_url(str(tmp_path))
    command = [sys.executable, "-c", READER, url]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with Connection(url) as connection, connection.SimpleQueue("q", serializer="json") as queue:
        for number in range(200):
            queue.put(f"{number:03}")
        for _ in readers:
            queue.put("stop")
    read = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0, 0]
    found = sorted(text for texts in read for text in texts)
    assert found == [f"{number:03}" for number in range(200)]
