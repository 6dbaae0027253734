"""The HTTP API in Flask, Django and FastAPI applications, and as a server of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from click.testing import CliRunner
from flask import Flask

from delaytasks.cli.main import main
from delaytasks.contrib import asgi
from delaytasks.contrib import flask as flask_mounts
from delaytasks.http_api.api_keys import ApiKeyFile
from tests.integration.django_settings import configured
from tests.integration.http_api.conftest import ApiSite
from tests.running import ROOT
from tests.ui.console_site import served
from tests.world.recording import run

NEW = {"tag": "order.close", "body": {"order": 7}, "delay": 60}


def headers_of(site: ApiSite) -> dict[str, str]:
    key, _ = site.keys.create("shop", ["read", "schedule:*"])
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


Post = Callable[[Any], httpx.Response]


@contextmanager
def in_flask(site: ApiSite) -> Iterator[Post]:
    app = Flask("shop")
    flask_mounts.mount(app, "/delays", site.app)
    client = httpx.Client(transport=httpx.WSGITransport(app), base_url="http://testserver")
    headers = headers_of(site)
    yield lambda content: client.post("/delays/v1/tasks", content=content, headers=headers)


@contextmanager
def in_django_with_asgi(site: ApiSite) -> Iterator[Post]:
    with configured():
        from django.core.handlers.asgi import ASGIHandler
        from django.test import override_settings
        from django.urls import include, path

        from delaytasks.contrib.django.mounting import mount

        class Urls:
            urlpatterns = [path("delays/", include(mount(site.app)))]

        csrf = ["django.middleware.csrf.CsrfViewMiddleware"]
        with override_settings(ALLOWED_HOSTS=["testserver"], ROOT_URLCONF=Urls, MIDDLEWARE=csrf):
            yield asgi_post(ASGIHandler(), site)


@contextmanager
def in_fastapi(site: ApiSite) -> Iterator[Post]:
    app = fastapi.FastAPI()
    asgi.mount(app, "/delays", site.app)
    yield asgi_post(app, site)


def asgi_post(app: Any, site: ApiSite) -> Post:
    headers = headers_of(site)

    async def asynchronous(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def post(content: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            if not isinstance(content, bytes):
                content = asynchronous(content)
            return await client.post("/delays/v1/tasks", content=content, headers=headers)

    return lambda content: run(post(content))


MOUNTS = [in_flask, in_django_with_asgi, in_fastapi]
Mount = Callable[[ApiSite], AbstractContextManager[Post]]


def in_chunks(document: Any, size: int) -> Iterator[bytes]:
    """Yield a body of `size` bytes. The client then sends it in chunks, without its length."""
    text = json.dumps(document).ljust(size).encode()
    return (text[at : at + 2**19] for at in range(0, size, 2**19))


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_mounted_request_has_the_size_limit_of_the_api(site: ApiSite, mount: Mount) -> None:
    """Servers that do not read chunks refuse them. Django asks for no CSRF token."""
    reads_chunks = mount is not in_flask
    with mount(site) as post:
        for mib, status in ((3, 200), (5, 413)):
            answer = post(json.dumps(NEW).ljust(mib * 2**20).encode())
            assert answer.status_code == status, answer.text
            chunks = post(in_chunks(NEW, mib * 2**20))
            assert chunks.status_code == (status if reads_chunks else 411), chunks.text
        for refused in (answer, chunks):
            assert refused.headers["Content-Type"] == "application/problem+json"


def test_the_server_refuses_a_long_request_before_it_receives_the_body(site: ApiSite) -> None:
    with served(site.app) as url:
        assert httpx.post(f"{url}/v1/tasks", json=NEW, headers=headers_of(site)).status_code == 200
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/v1/tasks")
        connection.putheader("Content-Length", str(10**9))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


ENDING = """
import os, signal
from delaytasks.cli.servers import Place, serve_apps
from delaytasks.settings import Address

def app(environ, start_response):
    os.kill(os.getpid(), signal.SIGTERM)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"answered"]

apps = {"app": (app, Place(Address("127.0.0.1", 0)))}
serve_apps(apps, None, lambda urls: print(*urls.values(), flush=True))
print("ended")
"""


def test_a_process_answers_its_requests_before_it_ends_on_term() -> None:
    command = [sys.executable, "-c", ENDING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert httpx.get(server.stdout.readline().strip(), timeout=10).text == "answered"
        assert server.stdout.read() == "ended\n"
    assert server.returncode == 0


def test_commands_add_list_and_remove_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", "sqlite:///a.sqlite3")

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(main, ["access", "api", *words, "--keys", "keys.json"])

    assert CliRunner().invoke(main, ["db", "upgrade"]).exit_code == 0
    key = invoke("shop", "--scope", "schedule:order.*", "--scope", "read").output.strip()
    found = ApiKeyFile(tmp_path / "keys.json").find(key)
    assert found is not None
    assert found.name == "shop"
    shown = {"name": "shop", "scopes": ["schedule:order.*", "read"]}
    assert json.loads(invoke("--json").output) == [shown]
    assert "schedule:order.*, read" in invoke().output
    for wrong in ("shop --scope read", "other --scope admin", "other"):
        assert invoke(*wrong.split()).exit_code == 2
    assert invoke("shop", "--remove").exit_code == 0
    assert invoke("shop", "--remove").exit_code == 2


def test_serve_serves_console_api_and_metrics_with_the_keys_of_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", "sqlite:///a.sqlite3")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    app = "from celery import Celery; from delaytasks import DelayTasks\n"
    app += "app = Celery('served', set_as_current=False); delays = DelayTasks(app)\n"
    Path("served_app.py").write_text(app)
    served_app = ["-A", "served_app"]
    assert CliRunner().invoke(main, [*served_app, "db", "upgrade"]).exit_code == 0
    create = [*served_app, "access", "api", "shop", "--scope", "read"]
    key = CliRunner().invoke(main, create).output.strip()
    command = [sys.executable, "-m", "delaytasks", *served_app, "serve", "--json"]
    command += ["--console", "0", "--api", "[::1]:0/delays", "--metrics", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            urls = json.loads("".join(server.stdout.readline() for _ in range(5)))
            assert re.fullmatch(r"http://\[::1\]:\d+/delays/", urls["api"])
            tasks, headers = f"{urls['api']}v1/tasks", {"Authorization": f"Bearer {key}"}
            assert httpx.get(tasks, headers=headers, timeout=10).status_code == 200
            login = httpx.get(urls["console"], timeout=10, follow_redirects=True)
            assert "Log in" in login.text
            assert "delaytasks_tasks" in httpx.get(urls["metrics"], timeout=10).text
        finally:
            server.terminate()
    assert server.returncode == 0


def test_serve_refuses_wrong_usage() -> None:
    wrong = {"": "say what to serve", "--api host": "is no address"}
    for words, says in {**wrong, "--console --keys k": "--keys requires --api"}.items():
        refused = CliRunner().invoke(main, ["serve", *words.split()])
        assert refused.exit_code == 2
        assert says in refused.output
