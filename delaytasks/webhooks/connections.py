"""Connections to strangers: to the address that was checked, in bounded time whatever the other side does.

A URL given here has an address in the place of its host, and the Host header names the host: by that name the server
is asked for its certificate, and by that name the certificate is checked.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
from contextlib import suppress
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
#: A receiver may send up to so many interim answers (status 1xx) before its final one.
INTERIM_MAX = 10
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
        self.sock = sock
        self.is_over = False
        self._idle_s = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.is_over:
            return None
        self.sock.settimeout(min(self._idle_s or left_s(), left_s()))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reader(io.BufferedReader):
    """Reads one answer. If bytes after the answer's end are in the buffer, they would be lost with it, and the rest of
    them would be taken for the answer to the next request: the socket is shut down, so that nobody uses it again."""

    raw: _InTime

    def close(self) -> None:
        if not self.closed:
            self.raw.is_over = True
            if self.peek():
                with suppress(OSError):
                    self.raw.sock.shutdown(socket.SHUT_RDWR)
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = _Reader(_InTime(self.fp.detach(), sock))

    def _read_status(self) -> tuple[str, int, str]:
        """The final answer's status line. `http.client` itself skips status 100 only, and without a bound: any other
        interim answer would be the result of this request, and the final answer that of the next one."""
        for _ in range(INTERIM_MAX + 1):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200 or status == http.client.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(f"more than {INTERIM_MAX} interim answers (status 1xx)")

    def begin(self) -> None:
        super().begin()
        self.will_close = (
            self.will_close
            or self.status == http.client.SWITCHING_PROTOCOLS
            or not self._is_framed()
        )

    def _is_framed(self) -> bool:
        """Whether the headers say in one way only where the answer ends."""
        codings, lengths = (
            self.headers.get_all(name, []) for name in ("Transfer-Encoding", "Content-Length")
        )
        if codings:
            return len(codings) == 1 and codings[0].lower() == "chunked" and not lengths
        return not lengths or (
            len(lengths) == 1 and re.fullmatch("[0-9]{1,18}", lengths[0]) is not None
        )


class _Unused:
    """A connection is used again only if nothing came on it since the last answer, not even inside TLS."""

    @property
    def is_connected(self) -> bool:
        sock = self.sock  # type: ignore[attr-defined]
        has_more = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        return not has_more and super().is_connected  # type: ignore[misc]


class _Connection(_Unused, HTTPConnection):
    response_class = _Response


class _TLSConnection(_Unused, HTTPSConnection):
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

    def build_connection_pool_key_attributes(
        self, request: PreparedRequest, verify: Any, cert: Any = None
    ) -> Any:
        place, _ = super().build_connection_pool_key_attributes(request, verify, cert)
        # Without TLS the name only keeps apart hosts that share an address: no connection is used for two of them.
        kind = {"server_hostname": urlsplit(f"//{request.headers['Host']}").hostname}
        return place, {**kind, "ssl_context": self._tls} if place["scheme"] == "https" else kind

    def cert_verify(self, *_: Any) -> None:
        """The context knows whom to trust."""
