"""Serves WSGI applications of delaytasks by themselves, with waitress."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from waitress.server import create_server

from delaytasks.model.errors import ConfigError
from delaytasks.settings import Address

THREADS = 8
#: A longer request is refused before the application sees it. Applications have lower limits.
MOST_RECEIVED_BYTES = 16 * 1024 * 1024


class Place(NamedTuple):
    """Where an application is served: an address, and a path such as `/delays` or an empty text."""

    address: Address
    path: str = ""

    @classmethod
    def read(cls, text: str) -> Place | None:
        """Read `[HOST:]PORT[/PATH]`, or return None."""
        start, slash, path = text.partition("/")
        address = Address.read(start)
        return address and cls(address, f"{slash}{path}".rstrip("/"))

    def url(self, port: int) -> str:
        return f"http://{self.address._replace(port=port)}{self.path}/"


def make_server(
    app: Any, place: Place, trusted_proxy: str | None = None, sockets: dict[int, Any] | None = None
) -> Any:
    """Return a server that listens; its method `run` serves until it is interrupted.

    Parameters
    ----------
    app
        The WSGI application.
    trusted_proxy
        The address of a proxy whose `X-Forwarded-For` and `X-Forwarded-Proto` name the address and
        the scheme of the browser.
    sockets
        The sockets of several servers. The method `run` of one of them then serves all.
    """
    forwarded: dict[str, Any] = {}
    if trusted_proxy is not None:
        forwarded = {
            "trusted_proxy": _address(trusted_proxy),
            "trusted_proxy_headers": {"x-forwarded-for", "x-forwarded-proto"},
            "clear_untrusted_proxy_headers": True,
        }
    try:
        return create_server(
            app,
            sockets,
            listen=str(place.address),
            threads=THREADS,
            url_prefix=place.path,
            ident=None,
            max_request_body_size=MOST_RECEIVED_BYTES,
            **forwarded,
        )
    except (OSError, ValueError) as error:  # a ValueError: the host has no address
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else str(error)
        raise ConfigError(f"cannot listen on {place.address}: {reason}") from error


def serve(
    apps: Mapping[str, tuple[Any, Place]],
    trusted_proxy: str | None,
    announce: Callable[[dict[str, str]], None],
) -> None:
    """Serve until the process gets INT or TERM. `announce` is called with the URL of each name."""
    sockets: dict[int, Any] = {}
    servers = {
        name: make_server(app, place, trusted_proxy, sockets) for name, (app, place) in apps.items()
    }
    # The first process of a container ignores TERM unless it has a handler.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    announce({name: apps[name][1].url(_port(server)) for name, server in servers.items()})
    try:
        next(iter(servers.values())).run()  # ends after the requests that have begun
    finally:
        signal.signal(signal.SIGTERM, before)
        for server in servers.values():
            server.task_dispatcher.shutdown()
            server.close()


def _port(server: Any) -> int:
    """Return the port, which a host with several addresses has for each of them."""
    addresses = getattr(server, "effective_listen", None)
    return int(addresses[0][1] if addresses else server.effective_port)


def _address(text: str) -> str:
    """Return an address as the server compares it with that of a peer."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"the trusted proxy is an IP address, not {text!r:.60}") from None
