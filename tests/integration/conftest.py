"""Deployments for tests with real workers, on a database and a broker that the test names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proxy import proxy_to
from tests.running import BROKERS, Deployment

Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def make(
        database: str = "postgresql",
        broker: str = "redis",
        conf: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Deployment:
        database_url = f"sqlite:///{tmp_path / 'test.sqlite3'}"
        if database != "sqlite":
            database_url = request.getfixturevalue(f"{database}_url")
        if broker == "filesystem":
            folder = tmp_path / "broker"
            folder.mkdir()
            names = ("data_folder_in", "data_folder_out", "control_folder")
            options = dict.fromkeys(names, str(folder))
            broker_url, own = "filesystem://", {"broker_transport_options": options}
        else:
            fixture, own = BROKERS[broker]
            broker_url = request.getfixturevalue(fixture)
        made.append(
            Deployment(tmp_path, database_url, broker_url, {**own, **(conf or {})}, **settings)
        )
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


class ProxiedSite:
    """Run a deployment that reaches its broker through a proxy."""

    def __init__(self, folder: Path, database_url: str, broker_url: str, **settings: Any) -> None:
        self.broker = proxy_to(broker_url)
        self.deployment = Deployment(folder, database_url, self.broker.url(broker_url), **settings)


@pytest.fixture
def proxied_site(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., ProxiedSite]]:
    made: list[ProxiedSite] = []

    def new(database: str, broker: str, folder: Path = tmp_path, **settings: Any) -> ProxiedSite:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        made.append(ProxiedSite(folder, *urls, **settings))
        return made[-1]

    yield new
    for one in made:
        one.broker.heal()
        one.deployment.close()
        one.broker.close()
