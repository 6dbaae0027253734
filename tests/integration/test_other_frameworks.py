"""The applications in docs/frameworks.md, as they are on the page."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from delaytasks.db.engines import create_sqlite_file
from delaytasks.http_api.api_keys import ApiKeyFile
from delaytasks.runtime import runtime_of
from delaytasks.testing import create_tables
from tests.doc_pages import blocks
from tests.running import ROOT

PAGE = ROOT / "docs/frameworks.md"


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

    asyncio.run(go())
    assert len(delays.find()) == 2
    delays.close()
