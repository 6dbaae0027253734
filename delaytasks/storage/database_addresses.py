"""Where a database is, as far as its URL says that."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from sqlalchemy import URL

SEVERAL_HOSTS = "several hosts of one PostgreSQL cluster are written as postgresql://user@/name?host=h1:5432&host=h2:5432"
_PORTS = {"postgresql": 5432, "mysql": 3306}


class DatabaseAddress(NamedTuple):
    """What two URLs must share to be the same database; users and options may differ."""

    backend: str
    host: str | None
    port: str
    database: str | None


def addresses_of(url: URL) -> frozenset[DatabaseAddress]:
    """One for each host of the URL, of which a cluster has several."""
    backend = {"mariadb": "mysql"}.get(url.get_backend_name(), url.get_backend_name())
    default = _PORTS.get(backend)
    hosts, ports = _listed(url, "host"), _listed(url, "port")
    places = set()
    for host, port in zip(hosts or [url.host], cycle(ports or [None])):
        # A socket's folder and IPv6 have no port behind a colon.
        name, _, own = (
            (host or "").partition(":") if (host or "").count(":") == 1 else (host, "", "")
        )
        number = str(own or port or url.port or default or "")
        places.add(DatabaseAddress(backend, name, number, url.database))
    return frozenset(places)


def _listed(url: URL, name: str) -> list[str | None]:
    """The values in the query, which drivers take instead of those before it."""
    for key in (name, "unix_socket", "service") if name == "host" else (name,):
        given = url.query.get(key)
        if given:
            return list(given.split(",") if isinstance(given, str) else given)
    return list(url.host.split(",")) if name == "host" and url.host else []
