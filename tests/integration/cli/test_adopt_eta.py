"""`adopt-eta` with brokers from which it cannot adopt, and its text."""

from __future__ import annotations

import re
import secrets
from importlib import import_module
from typing import Any

import pytest
from redis import Redis

from tests.doc_pages import block_beginning
from tests.integration.cli.project import Project
from tests.services import free_port


def _remind() -> None: ...


def app_of(shop: Project) -> Any:
    return import_module(shop.name).app


def test_a_broker_in_memory_has_no_messages_to_adopt(shop: Project) -> None:
    error = shop.error("adopt-eta", exit_code=2)
    assert "neither Redis nor RabbitMQ" in error["error"]


def test_a_broker_that_cannot_be_reached_is_named(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    error = shop.error("adopt-eta", exit_code=1)
    assert "127.0.0.1" in error["error"]
    assert "cannot be reached" in error["error"]


def test_a_router_that_cannot_name_a_queue_is_reported(
    shop: Project, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
    app_of(shop).conf.task_routes = lambda name, args, *more, **options: args[0]
    error = shop.error("adopt-eta", exit_code=2)
    assert "IndexError" in error["error"]
    assert "--queue" in error["error"]


def test_the_text_has_a_table_of_tasks_and_the_messages_that_stay(
    shop: Project, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
    app, queue = app_of(shop), f"adopted{secrets.token_hex(4)}"
    app.task(_remind, name="adopted.remind", durable_eta=True, shared=False)
    for countdown in (3600, 7200, None):
        app.send_task("adopted.remind", queue=queue, countdown=countdown, durable_eta=False)
    try:
        counted = shop("adopt-eta", "--queue", queue, "--dry-run").output.splitlines()
    finally:
        with Redis.from_url(redis_url) as client:
            client.delete(queue, f"_kombu.binding.{queue}")

    assert counted[0].split() == ["task", "messages", "first", "due", "last", "due"]
    assert counted[1].split()[:2] == ["adopted.remind", "2"]
    assert counted[-1] == "1 message without an eta: stay in their queue"
    documented = block_beginning("docs/move-from-eta.md", "task  ").text.splitlines()
    assert [*map(without_numbers, counted)] == [*map(without_numbers, documented)]


def without_numbers(line: str) -> str:
    """Return the line without the name of the task, numbers, times and the width of columns."""
    line = re.sub(r"\w+\.remind", "TASK", re.sub(r"\d{4}-\S+Z", "INSTANT", line))
    return re.sub(r" +", " ", re.sub(r"[\d,]+", "N", line).replace("messages", "message")).strip()
