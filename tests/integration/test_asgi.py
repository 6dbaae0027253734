"""ASGI frameworks: the lifespan, the transaction of a request, and the applications of the docs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from celery import Celery
from fastapi import BackgroundTasks, FastAPI, HTTPException
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker
from starlette.applications import Starlette

from delaytasks import ConfigError, DelayTasks
from delaytasks.contrib.asgi import delays_lifespan, request_transaction
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.store import Store
from delaytasks.http_api.api_keys import ApiKeyFile
from delaytasks.runtime import runtime_of
from delaytasks.testing import create_tables
from tests.doc_pages import blocks
from tests.running import ROOT
from tests.world.recording import delays_on, engine_at, run

PAGE = ROOT / "docs/frameworks.md"


def fail(_: Any) -> None:
    raise RuntimeError("the server is gone")


def test_a_requests_transaction_is_committed_before_a_good_response(
    store: Store, database_url: str
) -> None:
    delays = delays_on(database_url, table_prefix="s_", timer="direct", tags="any")
    app = FastAPI(lifespan=delays_lifespan(delays))
    #: The commits and the messages of responses.
    order: list[str] = []

    async def noticed(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            order.append(message["type"])
            await send(message)

        await app(scope, receive, sent)

    @app.post("/visits")
    async def visit(background: BackgroundTasks) -> None:
        background.add_task(delays.aschedule_delay, "visit.count", {}, 60)

    async def bodies(tag: str) -> list[Any]:
        return [task.body for task in (await delays.afind(tag=tag)).tasks]

    async def go() -> None:
        transport = httpx.ASGITransport(noticed, raise_app_exceptions=False)
        async with (
            engine_at(database_url) as engine,
            httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
        ):
            event.listen(engine.sync_engine, "commit", lambda _: order.append("commit"))
            dependency = request_transaction(async_sessionmaker(engine))

            async def schedule(outcome: str, session: Any = dependency) -> str:
                await delays.aschedule_delay("order.close", outcome, 60, session=session)
                if outcome != "returned":
                    raise HTTPException(409) if outcome == "refused" else RuntimeError(outcome)
                return outcome

            app.post("/orders/{outcome}")(schedule)
            for outcome, status in (("refused", 409), ("failed", 500)):
                assert (await client.post(f"/orders/{outcome}")).status_code == status
            assert "commit" not in order
            assert await bodies("order.close") == []
            order.clear()
            assert (await client.post("/orders/returned")).status_code == 200
            assert order[:2] == ["commit", "http.response.start"]
            assert await bodies("order.close") == ["returned"]
            await client.post("/visits")
            assert await bodies("visit.count") == [{}], "a background task"
            event.listen(engine.sync_engine, "commit", fail)
            assert (await client.post("/orders/returned")).status_code == 500, "a failed commit"

    with closing(delays):
        run(go())


@pytest.mark.parametrize("make", [FastAPI, Starlette])
def test_the_lifespan_closes_after_that_of_the_application(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays, order = delays_on("sqlite://"), list[str]()
    monkeypatch.setattr(type(runtime_of(delays)), "close", lambda self: order.append("closed"))

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
    delays.close()


def test_a_wrong_setting_stops_the_application_at_its_start() -> None:
    delays = DelayTasks(Celery("shop", broker="memory://"), "sqlite:///x", lease=-1)

    async def go() -> None:
        app = Starlette(lifespan=delays_lifespan(delays))
        with pytest.raises(ConfigError):
            async with app.router.lifespan_context(app):
                pass

    run(go())


# -- the applications in docs/frameworks.md, as they are on the page -------------------------------


def block_with(text: str) -> str:
    """Return the block of the page that contains a text."""
    return next(each.text for each in blocks(PAGE) if text in each.text)


def application(framework: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the block that imports a framework."""
    pytest.importorskip(framework)
    source = block_with(f"from {framework} import")
    file = folder / "shop.sqlite3"
    module = ModuleType("docs_application")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Litestar looks for types there
    names = vars(module)
    names["DATABASE_URL"] = f"sqlite:///{file}"
    names["ASYNC_DATABASE_URL"] = f"sqlite+aiosqlite:///{file}"
    exec(compile(source.replace("redis://localhost:6379/0", "memory://"), str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("root_path", ["", "/public"])
@pytest.mark.parametrize("framework", ["litestar", "quart"])
def test_a_request_schedules_in_its_transaction_and_the_http_api_is_mounted(
    framework: str, root_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = application(framework, tmp_path, monkeypatch)
    delays = names["delays"]
    create_sqlite_file(runtime_of(delays).store.database.url)
    with runtime_of(delays).store.database.begin() as connection:
        create_tables(connection, delays)
    keys = tmp_path / "api-keys.json"
    key, _ = ApiKeyFile(keys).create("shop", ["read", "schedule:*"])
    mounting = block_with("make_api(delays").replace("/etc/shop/api-keys.json", str(keys))
    exec(mounting.replace('"/delays"', '"/delays/"') if root_path else mounting, names)
    # The path of a request contains the root path, as in uvicorn.
    asgi: dict[str, Any] = {"root_path": root_path, "raise_app_exceptions": False}
    place: dict[str, Any] = {"transport": httpx.ASGITransport(names["server_app"], **asgi)}
    place |= {"base_url": f"http://shop{root_path}", "headers": {"Authorization": f"Bearer {key}"}}
    new = {"tag": "order.close", "body": {"order": 7}, "delay": 60}

    async def go() -> None:
        async with httpx.AsyncClient(**place) as client:
            task = (await client.post("/delays/v1/tasks", json=new)).json()
            found = (await client.get(f"/delays/v1/tasks/{task['id']}")).json()
            assert found["body"] == {"order": 7}
            document = (await client.get("/delays/v1/openapi.json")).json()
            assert document["servers"] == [{"url": f"{root_path}/delays"}]
            assert (await client.get("/delays-of-others")).status_code == 404
            assert (await client.post("/orders/8")).json() == {"order": 8}
            assert (await delays.aget(tag="order.close", key="8")).body == {"order": 8}
            assert (await client.post("/orders/8")).status_code == 500, "the key is in use"
        await names["sessions"].kw["bind"].dispose()

    run(go())
    assert len(delays.find()) == 2
    delays.close()
