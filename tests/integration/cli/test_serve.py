"""The commands `serve` and `access`: servers of their own, their users and their keys."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from delaytasks import ConfigError
from delaytasks.cli import servers
from delaytasks.cli.servers import Place, make_server
from delaytasks.console.application import standalone
from delaytasks.console.requests import FIRST_USER
from delaytasks.http_api.api_keys import ApiKeyFile, ApiKeys
from delaytasks.http_api.routes import make_api
from delaytasks.settings import Address
from tests.integration.cli.conftest import Project
from tests.ui.console_site import make_delays, served, token_of


def test_access_adds_lists_and_removes_users_and_keys(shop: Project, tmp_path: Path) -> None:
    def access(words: str, exit_code: int = 0) -> str:
        said = shop("access", *words.split())
        assert said.exit_code == exit_code, said.output
        return str(said.output)

    key = access("api shop --scope schedule:order.* --scope read --keys keys.json").strip()
    found = ApiKeyFile(tmp_path / "keys.json").find(key)
    assert found is not None
    assert found.name == "shop"
    shown = {"name": "shop", "scopes": ["schedule:order.*", "read"]}
    assert json.loads(access("api --json --keys keys.json")) == [shown]
    for wrong in ("shop --scope read", "other --scope admin"):
        access(f"api {wrong} --keys keys.json", exit_code=2)
    password = "--password a-long-password"
    stored = "stored the user ann with the role operate\n"
    assert access(f"console ann --role operate {password}") == stored
    assert json.loads(access("console --json")) == [{"name": "ann", "role": "operate"}]
    assert access(f"console ann {password}") == stored, "a new password keeps the role"
    assert "--scope requires access api" in access("console ann --scope read", exit_code=2)
    for remove in ("api shop --remove --keys keys.json", "console ann --remove"):
        access(remove)
        access(remove, exit_code=2)


def test_serve_serves_console_api_and_metrics_with_the_keys_of_the_data_folder(
    shop: Project,
) -> None:
    key = shop("access", "api", "shop", "--scope", "read").output.strip()
    command = ["-m", "delaytasks", "-A", shop.name, "serve", "--json"]
    places = ["--console", "0", "--api", "[::1]:0/delays", "--metrics", "0"]
    with shop.process(*command, *places) as server:
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "say what to serve"),
        ("--api host", "is no address"),
        ("--console --keys k", "--keys requires --api"),
        ("--console --trusted-proxy 127.0.0.1 --proxy-header X-User", "cannot be combined"),
    ],
)
def test_serve_refuses_wrong_usage(bare: Project, words: str, says: str) -> None:
    refused = bare("serve", *words.split())
    assert (refused.exit_code, says in refused.output) == (2, True)


def test_the_first_start_prints_a_password_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, data_dir = f"sqlite:///{tmp_path / 'a.sqlite3'}", str(tmp_path / "data")
    with closing(make_delays(url, data_dir=data_dir)) as delays:
        client = standalone(delays).test_client()
        password = re.search(r"password (\S+)\n", capsys.readouterr().out)
        assert password is not None
        data = {"csrf": token_of(client, "/login"), "name": FIRST_USER, "password": password[1]}
        assert client.post("/login", data=data).status_code == 303
        assert client.get("/").status_code == 200
        again = standalone(delays)
        assert capsys.readouterr().out == ""
        assert again.secret_key == client.application.secret_key, "sessions survive a restart"


# -- the server -----------------------------------------------------------------------------------


def answering(text: str) -> Any:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [text.format(**{name.replace(".", "_"): environ[name] for name in NAMED}).encode()]

    return app


NAMED = ("wsgi.url_scheme", "REMOTE_ADDR")


@pytest.mark.parametrize(
    ("proxy", "seen"),
    [("127.0.0.1", "https 192.0.2.7"), ("127.0.0.2", "http 127.0.0.1"), (None, "http 127.0.0.1")],
)
def test_a_trusted_proxy_names_the_address_and_scheme(proxy: str | None, seen: str) -> None:
    headers = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
    with served(answering("{wsgi_url_scheme} {REMOTE_ADDR}"), proxy) as url:
        assert httpx.get(url, headers=headers).text == seen
    with pytest.raises(ConfigError, match="is an IP address"):
        make_server(None, Place(Address("127.0.0.1", 0)), "proxy.example")


def test_requests_that_are_half_sent_keep_no_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "IDLE_S", 1)
    with served(answering("live")) as url, ExitStack() as opened:
        address = urlsplit(url)
        for _ in range(150):
            half = socket.create_connection((address.hostname or "", address.port or 0))
            opened.callback(half.close)
            half.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert httpx.get(url, timeout=10).text == "live"
        half.settimeout(10)
        assert half.recv(100) == b"", "an idle connection is closed"


def test_the_server_refuses_a_long_request_before_it_receives_the_body(tmp_path: Path) -> None:
    with ExitStack() as opened:
        delays = opened.enter_context(closing(make_delays(f"sqlite:///{tmp_path / 'a.sqlite3'}")))
        url = opened.enter_context(served(make_api(delays, ApiKeys({}))))
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
