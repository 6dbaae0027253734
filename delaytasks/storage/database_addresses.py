"""The addresses that a database URL contains, to compare databases, and URLs for messages."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from sqlalchemy import URL

from delaytasks.core.text import mask_url

SEVERAL_HOSTS = (
    "several hosts of one PostgreSQL cluster are written as "
    "postgresql://user@/name?host=h1:5432&host=h2:5432"
)
_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}


class DatabaseAddress(NamedTuple):
    """The parts of two URLs that are equal if they name the same database. Users and options may
    differ."""

    backend: str
    host: str | None
    port: str
    database: str | None


def addresses_of(url: URL) -> frozenset[DatabaseAddress]:
    """Return one address for each host in the URL. The URL of a cluster has several."""
    backend = {"mariadb": "mysql"}.get(url.get_backend_name(), url.get_backend_name())
    default = _DEFAULT_PORTS.get(backend)
    hosts, ports = _listed(url, "host"), _listed(url, "port")
    addresses = set()
    for host, port in zip(hosts or [url.host], cycle(ports or [None])):
        # A socket's folder and an IPv6 address have no port after a colon.
        name, _, own = (
            (host or "").partition(":") if (host or "").count(":") == 1 else (host, "", "")
        )
        number = str(own or port or url.port or default or "")
        addresses.add(DatabaseAddress(backend, name, number, url.database))
    return frozenset(addresses)


def _listed(url: URL, name: str) -> list[str | None]:
    """Return the values of `name` in the query. Drivers take them instead of those before the
    query."""
    for key in (name, "unix_socket", "service") if name == "host" else (name,):
        given = url.query.get(key)
        if given:
            return list(given.split(",") if isinstance(given, str) else given)
    return list(url.host.split(",")) if name == "host" and url.host else []


def masked(url: URL) -> str:
    """Return a URL for messages, without its secrets."""
    return mask_url(url.render_as_string(hide_password=True))
