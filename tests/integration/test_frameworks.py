"""Web frameworks: the console, the HTTP API and receivers of callbacks in their applications, and
the transactions and the lifespan of ASGI applications, with those of the docs."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from flask import Flask
from flask import session as flask_session
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request

from delaytasks import ConfigError, DelayTasks
from delaytasks.callbacks import webhook
from delaytasks.callbacks.signatures import SigningKeys
from delaytasks.console.application import make_console
from delaytasks.console.requests import Role, Viewer
from delaytasks.contrib import asgi
from delaytasks.contrib import flask as flask_mounts
from delaytasks.contrib.asgi import delays_lifespan, request_transaction
from delaytasks.db.store import Store
from delaytasks.http_api.api_keys import ApiKeys, new_entry
from delaytasks.http_api.routes import make_api
from delaytasks.model.clock import wall_ms
from delaytasks.runtime import runtime_of
from tests.doc_pages import blocks
from tests.integration.django_settings import configured
from tests.running import ROOT
from tests.ui.console_site import make_delays
from tests.world.recording import delays_on, engine_at, make_tables, run

SECRET = "a secret of the shop"
NEW = {"tag": "order.close", "body": {"order": 7}, "delay": 60}
#: The keys of the receivers, and one that they do not have.
*KEYS, OTHER = ("whsec_" + base64.b64encode(byte * 32).decode() for byte in (b"o", b"n", b"x"))


class AsgiClient:
    """A client of an ASGI application, with cookies."""

    def __init__(self, app: Any) -> None:
        self._app, self._cookies = app, httpx.Cookies()

    def get(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            where: Any = {"transport": httpx.ASGITransport(self._app), "base_url": "http://shop"}
            async with httpx.AsyncClient(**where, cookies=self._cookies) as client:
                answer = await client.request(method, path, **options)
                self._cookies.update(client.cookies)
                return answer

        return asyncio.run(send())

    def post(self, path: str, content: Any = None, **options: Any) -> httpx.Response:
        async def asynchronous() -> AsyncIterator[bytes]:
            for chunk in content:
                yield chunk

        is_whole = content is None or isinstance(content, bytes)
        return self.get(path, "POST", content=content if is_whole else asynchronous(), **options)


def wsgi_client(app: Any) -> httpx.Client:
    return httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop")


def shown(callback: Any, order: int) -> dict[str, Any]:
    return {"id": callback.id, "body": callback.body, "order": order}


def receivers_of(view: Callable[..., Any]) -> dict[str, Any]:
    """Return receivers with the parameters of `view`: a function and a coroutine function."""

    @functools.wraps(view)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        return view(*arguments, **named)

    receives = webhook(secret for secret in KEYS)
    return {"paid": receives(view), "apaid": receives(awaited)}


#: Mounts an application at a path, and returns the client; the viewer is a function of the
#: framework's request. Receivers of callbacks are at /paid and /apaid.
Mount = Callable[[dict[str, Any]], AbstractContextManager[Any]]


@contextmanager
def in_flask(mounted: dict[str, Any]) -> Iterator[Any]:
    app = Flask("shop")
    app.secret_key = SECRET
    for path, each in mounted.items():
        flask_mounts.mount(app, path, each)
    app.add_url_rule("/own", "own", lambda: "the shop")
    for name, view in receivers_of(lambda order, callback: shown(callback, order)).items():
        app.add_url_rule(f"/{name}/<int:order>", name, view, methods=["POST"])
    with wsgi_client(app) as client:
        yield client
        assert client.get("/own").text == "the shop"


@contextmanager
def in_django(mounted: dict[str, Any], is_asgi: bool = False) -> Iterator[Any]:
    with configured():
        from django.core.handlers.asgi import ASGIHandler
        from django.core.handlers.wsgi import WSGIHandler
        from django.http import JsonResponse
        from django.test import override_settings
        from django.urls import include, path

        from delaytasks.contrib.django import mount

        def paid(request: Any, order: int, callback: Any) -> Any:
            assert request.method == "POST"
            return JsonResponse(shown(callback, order))

        patterns = [path(f"{at[1:]}/", include(mount(each))) for at, each in mounted.items()]
        patterns += [path(f"{at}/<int:order>", one) for at, one in receivers_of(paid).items()]
        urls = type("Urls", (), {"urlpatterns": patterns})
        csrf = ["django.middleware.csrf.CsrfViewMiddleware"]
        with override_settings(ALLOWED_HOSTS=["shop"], ROOT_URLCONF=urls, MIDDLEWARE=csrf):
            yield AsgiClient(ASGIHandler()) if is_asgi else wsgi_client(WSGIHandler())


def in_django_with_asgi(mounted: dict[str, Any]) -> AbstractContextManager[Any]:
    return in_django(mounted, is_asgi=True)


@contextmanager
def in_fastapi(mounted: dict[str, Any]) -> Iterator[Any]:
    app = FastAPI()
    for path, each in mounted.items():
        asgi.mount(app, path, each)
    app.add_middleware(SessionMiddleware, secret_key=SECRET)

    def paid(order: int, request: Request, callback: Any) -> dict[str, Any]:
        assert request.url.path.endswith("paid/7")
        return shown(callback, order)

    app.add_api_route("/apaid/{order}", receivers_of(paid)["apaid"], methods=["POST"])
    yield AsgiClient(app)


MOUNTS = [in_flask, in_django, in_django_with_asgi, in_fastapi]


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[DelayTasks]:
    made = make_delays(f"sqlite:///{tmp_path / 'mounts.sqlite3'}")
    yield made
    made.close()


@pytest.mark.parametrize("mount", MOUNTS)
def test_the_users_of_the_application_are_the_viewers_of_the_console(
    delays: DelayTasks, mount: Mount
) -> None:
    people = ["ann"]

    def viewer(request: Any) -> Viewer | None:
        name = "ann"
        if isinstance(request, Request):
            name = request.session.setdefault("user", "ann")
        elif mount is in_flask:
            assert request.script_root == "/delays"
            name = flask_session.setdefault("user", "ann")  # not that of the console
        return Viewer(name, Role.OPERATE) if people else None

    with pytest.raises(ConfigError, match="secret_key"):
        make_console(delays, viewer)
    console = make_console(delays, viewer, secret_key=SECRET)
    assert console.secret_key != SECRET, "the console cannot sign the sessions of the app"
    with mount({"/delays": console}) as client:
        ready = {"is_healthy": True, "checks": {"database": True, "tables": True}}
        assert json.loads(client.get("/delays/health/ready").text) == ready
        text = client.get("/delays/tasks").text
        assert "<title>Tasks" in text
        assert 'hx-get="/delays/tasks"' in text, "the live view asks for this page again"
        [style] = re.findall(r'href="(/delays/static/console\.css[^"]*)"', text)
        assert "--ground" in client.get(style).text
        [token, *_] = re.findall(r'name="csrf" value="([^"]+)"', text)
        data = {"csrf": token, "tag": "mail", "next": "/policies"}
        answer = client.post("/delays/do/pause", data=data)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/delays/policies")
        assert delays.policies.list(tag="mail")[0].updated_by == "ann"
        people.clear()
        assert client.get("/delays/").status_code == 401


def in_chunks(size: int) -> Iterator[bytes]:
    """Yield a body of `size` bytes. The client then sends it in chunks, without its length."""
    text = json.dumps(NEW).ljust(size).encode()
    return (text[at : at + 2**19] for at in range(0, size, 2**19))


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_mounted_request_has_the_size_limit_of_the_api(delays: DelayTasks, mount: Mount) -> None:
    """Servers that do not read chunks refuse them. Django asks for no CSRF token."""
    key, entry = new_entry(["schedule:*"])
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    reads_chunks = mount in (in_django_with_asgi, in_fastapi)
    with mount({"/delays": make_api(delays, ApiKeys({"shop": entry}))}) as client:
        document = json.loads(client.get("/delays/v1/openapi.json").text)
        assert document["servers"] == [{"url": "/delays"}]
        for mib, status in ((3, 200), (5, 413)):
            content = b"".join(in_chunks(mib * 2**20))
            answer = client.post("/delays/v1/tasks", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            body = in_chunks(mib * 2**20)
            chunks = client.post("/delays/v1/tasks", content=body, headers=headers)
            assert chunks.status_code == (status if reads_chunks else 411), chunks.text
        for refused in (answer, chunks):
            assert refused.headers["Content-Type"] == "application/problem+json"


# -- Receivers of callbacks, which accept signed requests only ------------------------------------


PAYLOAD = '{"order": 7, "name": "é"}'.encode()


def signed(secret: str, payload: bytes = PAYLOAD, age_s: int = 0) -> dict[str, str]:
    timestamp = str(wall_ms() // 1000 - age_s)
    signature = SigningKeys(secret).sign("42", timestamp, payload)
    return {"webhook-id": "42", "webhook-timestamp": timestamp, "webhook-signature": signature}


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_view_receives_what_is_signed_and_refuses_the_rest(mount: Mount) -> None:
    received = {"id": "42", "body": {"order": 7, "name": "é"}, "order": 7}
    unsigned: Any = ({}, signed(KEYS[1], age_s=301), signed(OTHER), signed(KEYS[1], b"{}"))
    with mount({}) as client:
        # FastAPI calls functions in threads, which cannot read the body of a request.
        for path in ("/apaid/7",) if mount is in_fastapi else ("/paid/7", "/apaid/7"):
            for key in KEYS:
                answer = client.post(path, content=PAYLOAD, headers=signed(key))
                assert (answer.status_code, answer.json()) == (200, received)
            for headers in unsigned:
                refused = client.post(path, content=PAYLOAD, headers=headers)
                assert refused.status_code == 401, headers
            no_json = client.post(path, content=b"{nope", headers=signed(KEYS[1], b"{nope"))
            assert no_json.status_code == 400


# -- ASGI: the lifespan, and the transaction of a request -----------------------------------------


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

    async def bodies() -> list[Any]:
        return [task.body for task in (await delays.afind()).tasks]

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
            assert await bodies() == []
            order.clear()
            assert (await client.post("/orders/returned")).status_code == 200
            assert order[:2] == ["commit", "http.response.start"]
            assert await bodies() == ["returned"]
            event.listen(engine.sync_engine, "commit", fail)
            assert (await client.post("/orders/returned")).status_code == 500, "a failed commit"

    with closing(delays):
        run(go())


def test_the_lifespan_closes_after_that_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    delays, order = delays_on("sqlite://"), list[str]()
    monkeypatch.setattr(type(runtime_of(delays)), "close", lambda self: order.append("closed"))

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, str]]:
        order.append("began")
        yield {"name": "shop"}
        order.append("ended")

    async def go() -> None:
        app = Starlette(lifespan=delays_lifespan(delays, own))
        async with app.router.lifespan_context(app) as state:
            assert state == {"name": "shop"}
            assert order == ["began"]

    run(go())
    assert order == ["began", "ended", "closed"]
    monkeypatch.undo()
    delays.close()
    delays = delays_on("sqlite://", lease=-1)
    with pytest.raises(ConfigError):
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


@pytest.mark.parametrize("framework", ["litestar", "quart"])
def test_a_request_schedules_in_its_transaction(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = application(framework, tmp_path, monkeypatch)
    delays = names["delays"]
    make_tables(delays)
    transport = httpx.ASGITransport(names["app"], raise_app_exceptions=False)

    async def go() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.post("/orders/8")).json() == {"order": 8}
            assert (await delays.aget(tag="order.close", key="8")).body == {"order": 8}
            assert (await client.post("/orders/8")).status_code == 500, "the key is in use"
        await names["sessions"].kw["bind"].dispose()

    run(go())
    assert len(delays.find()) == 1
    delays.close()
