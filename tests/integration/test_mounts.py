"""The console and the HTTP API in Flask, Django and FastAPI applications."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from flask import Flask
from flask import session as flask_session
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request

from delaytasks import ConfigError, DelayTasks
from delaytasks.console.application import make_console
from delaytasks.console.viewers import Role, Viewer
from delaytasks.contrib import asgi
from delaytasks.contrib import flask as flask_mounts
from delaytasks.http_api.api_keys import ApiKeys, new_entry
from delaytasks.http_api.routes import make_api
from tests.integration.django_settings import configured
from tests.ui.console_site import make_delays

SECRET = "a secret of the shop"
NEW = {"tag": "order.close", "body": {"order": 7}, "delay": 60}


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


#: Mounts an application at a path, and returns the client; the viewer is a function of the
#: framework's request.
Mount = Callable[[dict[str, Any]], AbstractContextManager[Any]]


@contextmanager
def in_flask(mounted: dict[str, Any]) -> Iterator[Any]:
    app = Flask("shop")
    app.secret_key = SECRET
    for path, each in mounted.items():
        flask_mounts.mount(app, path, each)
    app.add_url_rule("/own", "own", lambda: "the shop")
    with wsgi_client(app) as client:
        yield client
        assert client.get("/own").text == "the shop"


@contextmanager
def in_django(mounted: dict[str, Any], is_asgi: bool = False) -> Iterator[Any]:
    with configured():
        from django.core.handlers.asgi import ASGIHandler
        from django.core.handlers.wsgi import WSGIHandler
        from django.test import override_settings
        from django.urls import include, path

        from delaytasks.contrib.django.mounting import mount

        patterns = [path(f"{at[1:]}/", include(mount(each))) for at, each in mounted.items()]
        urls = type("Urls", (), {"urlpatterns": patterns})
        csrf = ["django.middleware.csrf.CsrfViewMiddleware"]
        with override_settings(ALLOWED_HOSTS=["shop"], ROOT_URLCONF=urls, MIDDLEWARE=csrf):
            yield AsgiClient(ASGIHandler()) if is_asgi else wsgi_client(WSGIHandler())


def in_django_with_asgi(mounted: dict[str, Any]) -> AbstractContextManager[Any]:
    return in_django(mounted, is_asgi=True)


@contextmanager
def in_fastapi(mounted: dict[str, Any]) -> Iterator[Any]:
    app = fastapi.FastAPI()
    for path, each in mounted.items():
        asgi.mount(app, path, each)
    app.add_middleware(SessionMiddleware, secret_key=SECRET)
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

    console = make_console(delays, viewer, secret_key=SECRET)
    assert console.secret_key != SECRET, "the console cannot sign the sessions of the app"
    with mount({"/delays": console}) as client:
        ready = {"is_healthy": True, "checks": {"database": True, "tables": True}}
        assert json.loads(client.get("/delays/health/ready").text) == ready
        text = client.get("/delays/tasks").text
        assert "<title>Tasks" in text
        assert 'hx-get="/delays/tasks"' in text, "the live view asks for this page again"
        style = re.search(r'href="(/delays/static/console\.css[^"]*)"', text)
        assert style is not None
        assert "--ground" in client.get(style[1]).text
        [token, *_] = re.findall(r'name="csrf" value="([^"]+)"', text)
        data = {"csrf": token, "tag": "mail", "next": "/policies"}
        answer = client.post("/delays/do/pause", data=data)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/delays/policies")
        assert delays.policies.list(tag="mail")[0].updated_by == "ann"
        data["csrf"] = "wrong"
        assert client.post("/delays/do/resume", data=data).status_code == 403
        people.clear()
        assert client.get("/delays/").status_code == 401
        assert client.get("/delays/health/live").status_code == 200


def test_a_console_of_an_application_needs_its_secret(delays: DelayTasks) -> None:
    with pytest.raises(ConfigError, match="secret_key"):
        make_console(delays, lambda _: None)


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
        for mib, status in ((3, 200), (5, 413)):
            content = b"".join(in_chunks(mib * 2**20))
            answer = client.post("/delays/v1/tasks", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            body = in_chunks(mib * 2**20)
            chunks = client.post("/delays/v1/tasks", content=body, headers=headers)
            assert chunks.status_code == (status if reads_chunks else 411), chunks.text
        for refused in (answer, chunks):
            assert refused.headers["Content-Type"] == "application/problem+json"
