"""Deployments with real workers, and the projects of examples, on databases that a test names."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import pytest

from tests.proxy import Proxy, proxy_to
from tests.running import BROKERS, ROOT, Deployment, clean_environment, output_of
from tests.services import own_database

D = TypeVar("D", bound=Deployment)


class Deploy(Protocol):
    """The fixture `deploy`. `kind` is the class of the deployment that it makes."""

    @overload
    def __call__(self, *places: Any, kind: type[D], **settings: Any) -> D: ...

    @overload
    def __call__(self, *places: Any, **settings: Any) -> Deployment: ...


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    """The proxies that a test makes. They are closed after its deployments."""
    made: list[Proxy] = []
    yield made
    for proxy in made:
        proxy.close()


@pytest.fixture
def deploy(
    request: pytest.FixtureRequest, tmp_path: Path, proxies: list[Proxy], start_redis: object
) -> Iterator[Any]:
    """Make deployments on databases and brokers, each given by its name or its URL.

    They are closed before the servers of `start_redis` end.
    """
    made: list[Deployment] = []

    def url_of(name: str) -> str:
        url: str = name if "://" in name else request.getfixturevalue(f"{name}_url")
        return url

    def make(
        database: str = "postgresql",
        broker: str = "redis",
        conf: dict[str, Any] | None = None,
        *,
        kind: type[Deployment] = Deployment,
        folder: str = "",
        proxied: Collection[str] = (),
        **settings: Any,
    ) -> Deployment:
        """`proxied` names what is reached through a proxy: `database` or `broker`."""
        place, own = tmp_path / folder, dict[str, Any]()
        if broker == "direct":
            broker, settings = "memory://", {"timer": "direct", **settings}
        elif broker == "filesystem":
            names = ("data_folder_in", "data_folder_out", "control_folder")
            (place / "broker").mkdir(parents=True)
            own = {"broker_transport_options": dict.fromkeys(names, str(place / "broker"))}
            broker = "filesystem://"
        elif broker in BROKERS:
            if settings.get("timer") == "redis" and broker != "redis":
                settings["timer"] = url_of("redis")
            fixture, own = BROKERS[broker]
            broker = fixture.removesuffix("_url")
        place.mkdir(exist_ok=True)
        database = f"sqlite:///{place / 'test.sqlite3'}" if database == "sqlite" else database
        urls = {"database": url_of(database), "broker": url_of(broker)}
        own_proxies = {name: proxy_to(urls[name]) for name in proxied}
        proxies.extend(own_proxies.values())
        urls |= {name: proxy.url(urls[name]) for name, proxy in own_proxies.items()}
        made.append(kind(place, urls["database"], urls["broker"], own | (conf or {}), **settings))
        made[-1].proxies = own_proxies
        return made[-1]

    yield make
    for proxy in proxies:
        proxy.heal()
    for deployment in made:
        deployment.close()


@pytest.fixture
def site(deploy: Deploy, database: str, broker: str) -> Deployment:
    """The deployment of a test that names a database and a broker."""
    return deploy(database, broker)


# -- The projects of the example shops ------------------------------------------------------------


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database that only one test uses; its kind is the parameter."""
    kind: str = request.param
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'shop.sqlite3'}"
        return
    url, drop = own_database(request.getfixturevalue(f"{kind}_url"), f"_{secrets.token_hex(4)}")
    yield url
    drop()


def run_example(example: str, database_url: str, *arguments: str) -> str:
    """Run a command in an example's folder, without a broker, and return its output."""
    project = ROOT / "examples" / example
    environment = clean_environment(
        PYTHONPATH=f"{project}{os.pathsep}{ROOT}",
        SHOP_DATABASE_URL=database_url,
        SHOP_PAY_WITHIN_S="2",
        CELERY_BROKER_URL="amqp://localhost:1//",
    )
    return output_of([sys.executable, "-W", "ignore", *arguments], project, environment)
