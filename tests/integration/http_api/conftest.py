"""An HTTP API with tables of its own, and callers with keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from delaytasks import DelayTasks
from delaytasks.http_api.api_keys import ApiKeyFile
from delaytasks.http_api.routes import make_api
from tests.world.recording import delays_on, make_tables


class ApiCaller:
    """A program that calls the API with one key."""

    def __init__(self, app: Flask, key: str | None) -> None:
        self._app = app
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> TestResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        more = {} if body is None else {"json": body}
        client = self._app.test_client()
        return client.open(path, method=method, headers={**self._headers, **names}, **more)

    def json(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self(method, path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json

    def problem(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return the status, and the argument or the type of the problem."""
        answer = self(method, path, body, **headers)
        assert answer.content_type == "application/problem+json", answer.text
        assert answer.json is not None
        assert answer.json["status"] == answer.status_code
        kind = answer.json["type"].removeprefix("urn:delaytasks:")
        return answer.status_code, answer.json["argument"] if kind == "InvalidInputError" else kind


class ApiSite:
    """The API of a `DelayTasks`."""

    def __init__(self, delays: DelayTasks, folder: Path) -> None:
        self.delays = delays
        self.keys = ApiKeyFile(folder / "keys" / "api-keys.json")
        self.app = make_api(delays, self.keys)

    def caller(self, *scopes: str) -> ApiCaller:
        key, _ = self.keys.create(f"caller-{len(self.keys.entries)}", scopes)
        return ApiCaller(self.app, key)


@contextmanager
def site_on_a_file(folder: Path, **settings: Any) -> Iterator[ApiSite]:
    """Yield an API on the SQLite file `api.sqlite3`."""
    url = f"sqlite:///{folder / 'api.sqlite3'}"
    delays = delays_on(url, timer="direct", tags="any", **settings)
    make_tables(delays)
    yield ApiSite(delays, folder)
    delays.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ApiSite]:
    with site_on_a_file(tmp_path) as made:
        yield made


@pytest.fixture
def shop(site: ApiSite) -> ApiCaller:
    """A caller that may do everything."""
    return site.caller("read", "operate", "schedule:*", "schedule:delaytasks.callback", "queue:*")
