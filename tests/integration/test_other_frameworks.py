"""The applications in docs/other-frameworks.md, as they are on the page."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from delaytasks.wiring import wiring_of
from tests.doc_pages import blocks
from tests.running import ROOT


def application(framework: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the block that imports a framework."""
    pytest.importorskip(framework)
    page = ROOT / "docs/other-frameworks.md"
    source = next(each.text for each in blocks(page) if f"from {framework} import" in each.text)
    file = folder / "shop.sqlite3"
    module = ModuleType("docs_application")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Litestar looks for types there
    names = vars(module)
    names["DATABASE_URL"] = f"sqlite:///{file}"
    names["ASYNC_DATABASE_URL"] = f"sqlite+aiosqlite:///{file}"
    exec(compile(source.replace("redis://localhost:6379/0", "memory://"), str(page), "exec"), names)
    return names


@pytest.mark.parametrize("framework", ["litestar", "quart"])
def test_a_request_schedules_in_its_transaction(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = application(framework, tmp_path, monkeypatch)
    delays, sessions = names["delays"], names["sessions"]
    with wiring_of(delays).store.database.begin() as connection:
        delays.create_tables(connection)

    async def go() -> None:
        transport = httpx.ASGITransport(names["app"], raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.post("/orders/7")).json() == {"order": 7}
            assert (await delays.aget(tag="order.close", key="7")).body == {"order": 7}
            assert (await client.post("/orders/7")).status_code == 500, "the key is in use"
        await sessions.kw["bind"].dispose()

    asyncio.run(go())
    assert len(delays.find()) == 1
    delays.close()
