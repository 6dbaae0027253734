"""Test `schedule`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.integration.cli.project import Project
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
