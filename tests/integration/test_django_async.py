"""Test the asynchronous methods in Django: they run on the connection of its asynchronous ORM."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks.runtime import runtime_of

pytest.importorskip("django")

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient
from django.test.utils import override_settings
from django.urls import path

from delaytasks.contrib.django.instance import DjangoDelays
from tests.integration import django_settings

#: The instance that the views use.
made: list[DjangoDelays] = []


async def close_later(request: HttpRequest) -> JsonResponse:
    task = await made[0].aschedule_delay("order.close", {"order": 7}, 60)
    found = await made[0].aget(task)
    return JsonResponse({"id": found.id})


urlpatterns = [path("orders/", close_later)]


@pytest.fixture(scope="module", autouse=True)
def django() -> Iterator[None]:
    with django_settings.configured():
        yield


@pytest.fixture
def delays(django: None, database_url: str) -> Iterator[DjangoDelays]:
    alias = "async_" + secrets.token_hex(3)  # asgiref's thread keeps its connections
    django_settings.add_database(alias, database_url)
    prefix = "d" + secrets.token_hex(3) + "_"
    delays = DjangoDelays(django_settings.new_celery_app(), alias, table_prefix=prefix)
    schema, database = runtime_of(delays).store.schema, runtime_of(delays).store.database
    with database.begin() as connection:
        schema.metadata.create_all(connection)
    made.append(delays)
    yield delays
    made.clear()
    with database.begin() as connection:
        schema.metadata.drop_all(connection)
    delays.close()
    django_settings.remove_database(alias)


@pytest.fixture
def run(delays: DjangoDelays) -> Callable[[Any], Any]:
    """Run a coroutine, and close the connection that Django has in the thread of its ORM."""

    async def closing(coroutine: Any) -> Any:
        try:
            return await coroutine
        finally:
            await sync_to_async(lambda: connections[delays.alias].close())()

    return lambda coroutine: asyncio.run(closing(coroutine))


def test_a_call_uses_the_connection_of_djangos_asynchronous_orm(
    delays: DjangoDelays, run: Callable[[Any], Any]
) -> None:
    statements: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        statements.append(sql)
        return execute(sql, *rest)

    async def go() -> int:
        await sync_to_async(lambda: connections[delays.alias].execute_wrappers.append(note))()
        return (await delays.aschedule_delay("order.close", {}, 60)).id

    id = run(go())
    assert [task.id for task in delays.find()] == [id]
    assert any(sql.startswith("INSERT INTO") for sql in statements)
    connections[delays.alias].close()


def test_a_synchronous_call_in_a_coroutine_names_its_twin(
    delays: DjangoDelays, run: Callable[[Any], Any]
) -> None:
    async def go() -> None:
        delays.schedule_delay("order.close", {}, 60)

    with pytest.raises(SynchronousOnlyOperation, match="such as aschedule_delay"):
        run(go())


def test_an_asynchronous_view_schedules(delays: DjangoDelays, run: Callable[[Any], Any]) -> None:
    async def go() -> dict[str, int]:
        answers = await asyncio.gather(*(AsyncClient().get("/orders/") for _ in range(5)))
        assert {answer.status_code for answer in answers} == {200}
        found: dict[str, int] = answers[0].json()
        return found

    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
        assert run(go())["id"] in [task.id for task in delays.find()]
    assert len(delays.find()) == 5
    connections[delays.alias].close()


def test_a_task_belongs_to_the_atomic_block_of_a_function_in_the_same_thread(
    delays: DjangoDelays, run: Callable[[Any], Any]
) -> None:
    def roll_back() -> None:
        with transaction.atomic(delays.alias):
            delays.schedule_delay("order.close", {}, 60)
            transaction.set_rollback(True, using=delays.alias)

    async def go() -> int:
        await sync_to_async(roll_back)()
        return len(await delays.afind())

    assert run(go()) == 0
