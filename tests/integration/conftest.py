"""Deployments for tests with real workers, on a database and a broker that the test names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import pytest

from tests.proxy import Proxy, proxy_to
from tests.running import BROKERS, Deployment

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
