"""FastAPI and Starlette: the lifespan, and the transaction of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from celery import Celery
from fastapi import BackgroundTasks, FastAPI, HTTPException
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from starlette.applications import Starlette

from delaytasks import ConfigError, DelayTasks
from delaytasks.contrib.asgi import delays_lifespan, request_transaction
from delaytasks.db.store import Store
from delaytasks.runtime import runtime_of
from tests.world.recording import delays_on, engine_at, run


@pytest.fixture
def delays(store: Store, database_url: str) -> Iterator[DelayTasks]:
    made = delays_on(database_url, table_prefix="s_", timer="direct", tags="any")
    yield made
    made.close()


class FastAPIShop:
    """A FastAPI application that schedules in the transaction of the request."""

    def __init__(self, delays: DelayTasks, engine: AsyncEngine) -> None:
        self.delays = delays
        self.engine = engine
        self.app = FastAPI(lifespan=delays_lifespan(delays))
        #: The commits and the messages of responses, in their order.
        self.order: list[str] = []
        event.listen(engine.sync_engine, "commit", lambda _: self.order.append("commit"))
        dependency = request_transaction(async_sessionmaker(engine))

        async def schedule(outcome: str, session: Any = dependency) -> str:
            await delays.aschedule_delay("order.close", outcome, 60, session=session)
            if outcome != "returned":
                raise HTTPException(409) if outcome == "refused" else RuntimeError(outcome)
            return outcome

        async def visit(background: BackgroundTasks) -> None:
            background.add_task(delays.aschedule_delay, "visit.count", {}, 60)

        self.app.post("/orders/{outcome}")(schedule)
        self.app.post("/visits")(visit)

    async def post(self, path: str) -> int:
        async def noticed(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                self.order.append(message["type"])
                await send(message)

            await self.app(scope, receive, sent)

        transport = httpx.ASGITransport(noticed, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return (await client.post(path)).status_code

    async def bodies(self) -> list[Any]:
        return [task.body for task in (await self.delays.afind()).tasks]


@asynccontextmanager
async def shop_of(delays: DelayTasks) -> AsyncIterator[FastAPIShop]:
    url = runtime_of(delays).store.database.url
    async with engine_at(url.render_as_string(hide_password=False)) as engine:
        yield FastAPIShop(delays, engine)


def fail(_: Any) -> None:
    raise RuntimeError("the server is gone")


def test_a_requests_transaction_is_committed_before_a_good_response(delays: DelayTasks) -> None:
    async def go() -> None:
        async with shop_of(delays) as shop:
            for outcome, status in (("refused", 409), ("failed", 500)):
                assert await shop.post(f"/orders/{outcome}") == status
            assert "commit" not in shop.order
            assert await shop.bodies() == []
            shop.order.clear()
            assert await shop.post("/orders/returned") == 200
            assert shop.order[:2] == ["commit", "http.response.start"]
            assert await shop.bodies() == ["returned"]
            assert await shop.post("/visits") == 200
            assert len((await delays.afind(tag="visit.count")).tasks) == 1, "a background task"
            event.listen(shop.engine.sync_engine, "commit", fail)
            assert await shop.post("/orders/returned") == 500, "a failed commit"

    run(go())


@pytest.mark.parametrize("make", [FastAPI, Starlette])
def test_the_lifespan_closes_after_that_of_the_application(
    delays: DelayTasks, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    runtime = runtime_of(delays)
    monkeypatch.setattr(type(runtime), "close", lambda self: order.append("closed"))

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, str]]:
        order.append("began")
        yield {"name": "shop"}
        order.append("ended")

    async def go() -> None:
        app = make(lifespan=delays_lifespan(delays, own))
        async with app.router.lifespan_context(app) as state:
            assert state == {"name": "shop"}
            assert order == ["began"]

    run(go())
    assert order == ["began", "ended", "closed"]
    monkeypatch.undo()


def test_a_wrong_setting_stops_the_application_at_its_start() -> None:
    delays = DelayTasks(Celery("shop", broker="memory://"), "sqlite:///x", lease=-1)

    async def go() -> None:
        app = Starlette(lifespan=delays_lifespan(delays))
        with pytest.raises(ConfigError):
            async with app.router.lifespan_context(app):
                pass

    run(go())
