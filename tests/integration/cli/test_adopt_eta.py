"""`adopt-eta` with brokers from which it cannot adopt, and its text."""

from __future__ import annotations

import secrets
from importlib import import_module
from typing import Any

import pytest
from redis import Redis

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
