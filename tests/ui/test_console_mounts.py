"""The console in Flask, Django and FastAPI applications, and as a server of its own."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastapi
import httpx
import pytest
from click.testing import CliRunner
from flask import Flask
from flask import session as flask_session
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request

from delaytasks import ConfigError, DelayTasks
from delaytasks.cli import servers
from delaytasks.cli.main import main
from delaytasks.cli.servers import Place, make_server
from delaytasks.console.application import make_console, standalone
from delaytasks.console.viewers import FIRST_USER, Role, Viewer
from delaytasks.contrib import asgi
from delaytasks.contrib import flask as flask_mounts
from delaytasks.settings import Address
from tests.integration.django_settings import configured
from tests.ui.console_site import make_delays, served, token_of

SECRET = "a secret of the shop"


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[DelayTasks]:
    made = make_delays(f"sqlite:///{tmp_path / 'mounts.sqlite3'}")
    yield made
    made.close()


def check_console(client: Any, delays: DelayTasks, get_text: Any) -> None:
    """Open a page below /delays, follow a link to a style sheet, and pause a tag."""
    ready = {"is_healthy": True, "checks": {"database": True, "tables": True}}
    assert json.loads(get_text(client.get("/delays/health/ready"))) == ready
    text = get_text(client.get("/delays/tasks"))
    assert "<title>Tasks" in text
    assert 'hx-get="/delays/tasks"' in text, "the live view asks for this page again"
    style = re.search(r'href="(/delays/static/console\.css[^"]*)"', text)
    assert style is not None
    assert "--ground" in get_text(client.get(style[1]))
    token = re.search(r'name="csrf" value="([^"]+)"', text)
    assert token is not None
    data = {"csrf": token[1], "tag": "mail", "next": "/policies"}
    answer = client.post("/delays/do/pause", data=data, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/delays/policies"
    assert delays.policies.list(tag="mail")[0].updated_by == "ann"
    data["csrf"] = "wrong"
    assert client.post("/delays/do/resume", data=data).status_code == 403


def check_refused(client: Any) -> None:
    assert client.get("/delays/").status_code == 401
    assert client.get("/delays/health/live").status_code == 200


def test_in_flask_the_users_of_the_app_are_the_viewers(delays: DelayTasks) -> None:
    app = Flask("shop")
    app.secret_key = SECRET
    people = ["ann"]

    def viewer(request: Any) -> Viewer | None:
        assert request.script_root == "/delays"
        name = flask_session.setdefault("user", "ann")  # the session of the app, not the console's
        return Viewer(name, Role.OPERATE) if people else None

    console = make_console(delays, viewer, secret_key=SECRET)
    flask_mounts.mount(app, "/delays", console)
    assert console.secret_key != SECRET, "the console cannot sign the sessions of the app"

    @app.get("/own")
    def own() -> str:
        return "the shop"

    client = app.test_client()

    def text_of(answer: Any) -> str:
        with answer:  # a file of the package stays open until then
            text: str = answer.get_data(as_text=True)
            return text

    check_console(client, delays, text_of)
    assert client.get("/own").text == "the shop"
    people.clear()
    check_refused(client)
    with pytest.raises(ConfigError, match="secret_key"):
        make_console(delays, viewer)


def test_in_django_staff_are_the_viewers(delays: DelayTasks) -> None:
    with configured():
        from django.test import Client, override_settings
        from django.urls import include, path

        from delaytasks.contrib.django.mounting import mount

        people = [Viewer("ann", Role.OPERATE)]
        console = make_console(delays, lambda _: next(iter(people), None), secret_key=SECRET)
        urls = type("Urls", (), {"urlpatterns": [path("delays/", include(mount(console)))]})
        with override_settings(ALLOWED_HOSTS=["testserver"], ROOT_URLCONF=urls):
            client = Client(enforce_csrf_checks=True)
            check_console(client, delays, lambda answer: answer.content.decode())
            people.clear()
            check_refused(client)


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

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.get(path, "POST", **options)


def test_in_fastapi_a_function_of_the_request_names_the_viewer(delays: DelayTasks) -> None:
    app = fastapi.FastAPI()

    def viewer(request: Request) -> Viewer | None:
        is_known = request.session.setdefault("user", "ann") == "ann"
        return Viewer("ann", Role.OPERATE) if is_known and people else None

    people = ["ann"]
    console = make_console(delays, viewer, secret_key=SECRET)
    asgi.mount(app, "/delays", console)
    app.add_middleware(SessionMiddleware, secret_key=SECRET)
    client = AsgiClient(app)
    check_console(client, delays, lambda answer: answer.text)
    people.clear()
    check_refused(client)


def test_the_first_start_prints_a_password_once(delays: DelayTasks, tmp_path: Path) -> None:
    delays._renew_runtime(data_dir=str(tmp_path / "data"))
    said: list[str] = []
    client = standalone(delays, said.append).test_client()
    password = re.search(r"password (\S+)$", said[0])
    assert password is not None
    data = {"csrf": token_of(client, "/login"), "name": FIRST_USER, "password": password[1]}
    assert client.post("/login", data=data).status_code == 303
    assert client.get("/").status_code == 200
    said.clear()
    again = standalone(delays, said.append)
    assert said == []
    assert again.secret_key == client.application.secret_key, "sessions survive a restart"


def test_a_command_adds_and_removes_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    url = {"DELAYTASKS_DATABASE_URL": f"sqlite:///{tmp_path / 'cli.sqlite3'}"}
    assert runner.invoke(main, ["db", "upgrade"], env=url).exit_code == 0
    add = ["access", "console", "ann", "--role", "operate", "--password", "a long password"]
    stored = "stored the user ann with the role operate\n"
    assert runner.invoke(main, add, env=url).output == stored
    listed = runner.invoke(main, ["access", "console", "--json"], env=url)
    assert json.loads(listed.output) == [{"name": "ann", "role": "operate"}]
    new_password = ["access", "console", "ann", "--password", "another password"]
    assert "role operate" in runner.invoke(main, new_password, env=url).output
    assert "'NAME'" in runner.invoke(main, ["access", "console", "--remove"], env=url).output
    remove = ["access", "console", "ann", "--remove"]
    assert runner.invoke(main, remove, env=url).exit_code == 0
    assert runner.invoke(main, remove, env=url).exit_code == 2
    other = ["access", "console", "ann", "--scope", "read"]
    assert "--scope requires access api" in runner.invoke(main, other, env=url).output


@pytest.mark.parametrize(
    ("proxy", "seen"),
    [("127.0.0.1", "https 192.0.2.7"), ("127.0.0.2", "http 127.0.0.1"), (None, "http 127.0.0.1")],
)
def test_a_trusted_proxy_names_the_address_and_scheme(proxy: str | None, seen: str) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [f"{environ['wsgi.url_scheme']} {environ['REMOTE_ADDR']}".encode()]

    headers = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
    with served(app, proxy) as url:
        assert httpx.get(url, headers=headers).text == seen


def test_requests_that_are_half_sent_keep_no_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"live"]

    monkeypatch.setattr(servers, "IDLE_S", 1)
    with served(app) as url, ExitStack() as opened:
        address = urlsplit(url)
        for _ in range(150):
            half = socket.create_connection((address.hostname or "", address.port or 0))
            opened.callback(half.close)
            half.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert httpx.get(url, timeout=10).text == "live"
        half.settimeout(10)
        assert half.recv(100) == b"", "an idle connection is closed"


def test_a_proxy_is_an_address_and_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is an IP address"):
        make_server(None, Place(Address("127.0.0.1", 0)), "proxy.example")
    url = {"DELAYTASKS_DATABASE_URL": f"sqlite:///{tmp_path / 'cli.sqlite3'}"}
    both = ["serve", "--console", "--trusted-proxy", "127.0.0.1", "--proxy-header", "X-User"]
    refused = CliRunner().invoke(main, both, env=url)
    assert refused.exit_code == 2
    assert "cannot be combined" in refused.output
