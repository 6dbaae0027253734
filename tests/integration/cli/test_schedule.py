"""Test `schedule` and `schedule --many`."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from delaytasks.db import producer
from tests.integration.cli.project import Project, lines
from tests.services import free_port


def test_schedule_answers_with_the_task(shop: Project) -> None:
    options = ["--key", "k", "--priority", "3", "--queue", "q", "--id", "42"]
    task = shop.json("schedule", "ok", '{"n": 9007199254740993}', "--delay", "1h30m", *options)
    wanted: dict[str, Any] = {"id": "42", "status": "NOT_COMPLETE", "tag": "ok", "key": "k"}
    wanted |= {"queue": "q", "priority": 3, "body": {"n": 9007199254740993}, "delay_s": 5400}
    assert task == task | wanted
    assert shop.json("schedule", "mail", "--delay", "1h")["queue"] == "letters"
    stored = shop.delays.get(42)
    assert stored.body == {"n": 9007199254740993}
    assert stored.expected_time.isoformat() == task["expected_time"]


def test_schedule_takes_an_instant_and_prints_a_sentence(shop: Project) -> None:
    task = shop.json("schedule", "ok", "--at", "2030-01-01T02:00:00+02:00")
    assert task["expected_time"] == "2030-01-01T00:00:00+00:00"
    said = shop("schedule", "ok", "--delay", "30m", "--id", "42")
    assert said.exit_code == 0
    assert re.fullmatch(r"scheduled task 42 \(ok\): due \S+Z, in (30m|29m59s)\n", said.stdout)


def test_a_body_comes_from_a_file_or_from_stdin(shop: Project, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('["é"]', encoding="utf-8")
    assert shop.json("schedule", "ok", "@body.json", "--delay", "1h")["body"] == ["é"]
    assert shop.json("schedule", "ok", "-", "--delay", "1h", typed='{"a": 1}')["body"] == {"a": 1}
    assert shop.json("schedule", "ok", "--delay", "1h")["body"] is None


def test_a_key_in_use_is_refused_kept_or_replaced(shop: Project) -> None:
    first = shop.json("schedule", "ok", "1", "--delay", "1h", "--key", "k")
    again = ["schedule", "ok", "2", "--delay", "2h", "--key", "k"]
    assert shop.error(*again, exit_code=1)["type"] == "DuplicateTaskError"
    kept = shop.json(*again, "--on-conflict", "keep")
    assert (kept["id"], kept["body"]) == (first["id"], 1)
    replaced = shop.json(*again, "--on-conflict", "replace")
    assert (replaced["id"], replaced["body"]) == (first["id"], 2)


def test_an_unavailable_broker_is_reported_and_does_no_harm(shop: Project) -> None:
    shop.patch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    said = shop("schedule", "ok", "--delay", "1")
    assert said.exit_code == 0
    assert "a sweep will send it" in said.stderr
    assert len(shop.delays.find()) == 1


def test_tasks_come_from_a_file_or_stdin_and_share_options(shop: Project, tmp_path: Path) -> None:
    text = lines({"tag": "ok", "body": {"n": 1}, "delay": "1h"})
    text += lines({"tag": "mail", "at": "2030-01-01T00:00:00Z", "key": "k"})
    text += lines({"tag": "ok", "delay": 90, "id": "42", "priority": 5, "queue": "q"})
    (tmp_path / "many.jsonl").write_text(f"{text}\n")
    assert shop.json("schedule", "--many", "many.jsonl") == {"scheduled": 3}
    task = {"tag": "ok", "delay": 90}
    text = lines(task, {**task, "priority": 1, "queue": "own"})
    said = shop("schedule", "--many", "-", "--queue", "all", "--priority", "7", typed=text)
    assert (said.exit_code, said.stdout, said.stderr) == (0, "scheduled 2 tasks\n", "")
    found = {task.queue: task for task in shop.delays.find()}
    priorities = {queue: task.priority for queue, task in found.items()}
    assert priorities == {"default": 0, "letters": 0, "q": 5, "all": 7, "own": 1}
    assert (found["default"].body, found["q"].id) == ({"n": 1}, 42)
    assert found["letters"].key == "k"
    assert found["letters"].expected_time == datetime(2030, 1, 1, tzinfo=timezone.utc)


#: The wrong argument, and lines with this error.
WRONG = """
    body: { | {"tag": "ok", "delay": 1, "body": NaN}
    tag: [1] | {"delay": 1}
    dely: {"tag": "ok", "dely": 1}
    delay: {"tag": "ok", "delay": "soon"} | {"tag": "ok"}
    at: {"tag": "ok", "at": 5}
    id: {"tag": "ok", "delay": 1, "id": 0}
"""


def test_a_wrong_line_is_named_and_nothing_of_its_batch_is_written(shop: Project) -> None:
    right = lines({"tag": "ok", "delay": 90})
    for argument, wrong in re.findall(r"^    (\w+): (.*)$", WRONG, re.MULTILINE):
        for line in wrong.split(" | "):
            text = f"{right}{line}\n{right}"
            found = shop.error("schedule", "--many", "-", exit_code=2, typed=text)
            assert found["argument"] == argument, line
            says = "did you mean 'delay'" if argument == "dely" else "line 2: "
            assert says in found["error"]
            assert found["error"].endswith("; nothing was scheduled")
    assert len(shop.delays.find()) == 0


def test_a_line_that_is_not_utf8_is_named(shop: Project) -> None:
    said = shop("schedule", "--many", "-", "--json", typed=b'{"tag": "\xff"}\n')
    assert said.exit_code == 2
    assert "line 1: the line is not UTF-8" in json.loads(said.stderr)["error"]


def test_an_error_in_a_later_batch_counts_the_scheduled_tasks(shop: Project) -> None:
    shop.patch.setattr(producer, "BULK", 2)
    text = lines(*[{"tag": "ok", "delay": 90}] * 5, {"tag": "ok", "delay": -1})
    said = shop("schedule", "--many", "-", "--json", typed=text)
    assert said.exit_code == 2
    message = json.loads(said.stderr)["error"]
    assert message.startswith("line 6: delay is finite and not negative")
    assert message.endswith("; 4 tasks scheduled, those before line 5")
    assert len(shop.delays.find()) == 4


def test_conflicts_among_many_name_the_uncertain_lines_unless_tasks_are_kept(shop: Project) -> None:
    text = lines(*({"tag": "ok", "delay": 90, "key": key} for key in "aba"))
    found = shop.error("schedule", "--many", "-", typed=text, exit_code=1)
    assert found["type"] == "DuplicateTaskError"
    assert "perhaps some of lines 1 to 3" in found["error"]
    kept = shop.json("schedule", "--many", "-", "--on-conflict", "keep", typed=text)
    assert kept == {"scheduled": 2}
