"""Connections to strangers: to the address that was checked, in bounded time whatever the other side does.

A URL given here has an address in the place of its host, and the Host header names the host: by that name the server
is asked for its certificate, and by that name the certificate is checked.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from delaytasks.core.clock import monotonic

#: Connections kept: to so many addresses, and so many to each, or as many as are used at once.
KEPT = 100
#: When the exchange under way in this thread must be over.
ends: ContextVar[float] = ContextVar("ends")


def left_s() -> float:
    """Of the time for the exchange under way."""
    left = ends.get() - monotonic()
    if left <= 0:
        raise TimeoutError("the whole took too long")
    return left


class _InTime(io.RawIOBase):
    """What a socket brings until time is up: each wait is bounded by what is left for all of them, or who sends a byte
    now and then, in headers or body, would keep us for ever."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._sock = sock
        self._idle_s = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(min(self._idle_s or left_s(), left_s()))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_InTime(self.fp.detach(), sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _TLSConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class Adapter(HTTPAdapter):
    """The kept connections of a process. Used without a `requests.Session`, which would add cookies, .netrc, proxies of
    the environment, and read redirects to their end."""

    def __init__(self, ca_file: str, at_once: int) -> None:
        # One for all connections: to read the authorities takes as long as forty callbacks.
        self._tls = ssl.create_default_context(cafile=ca_file or DEFAULT_CA_BUNDLE_PATH)
        super().__init__(pool_connections=KEPT, pool_maxsize=max(KEPT, at_once))

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}

    def build_connection_pool_key_attributes(self, request: PreparedRequest, verify: Any, cert: Any = None) -> Any:
        place, _ = super().build_connection_pool_key_attributes(request, verify, cert)
        if place["scheme"] != "https":
            return place, {}
        return place, {"ssl_context": self._tls, "server_hostname": urlsplit(f"//{request.headers['Host']}").hostname}

    def cert_verify(self, *_: Any) -> None:
        """The context knows whom to trust."""
