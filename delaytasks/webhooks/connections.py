"""HTTP connections to untrusted servers: to the address that was checked, and with time limits.

The host of a URL is replaced by its address here, and the `Host` header has the name. TLS asks the
server for the certificate of that name, and checks the certificate against it.
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

#: The number of addresses to which connections stay open, and of open connections to each of them.
#: The latter is higher if `callback_in_flight` is higher.
MAX_OPEN_CONNECTIONS = 100
#: A receiver may send this number of interim responses (status 1xx) before the final one.
MAX_INTERIM_RESPONSES = 10
#: Responses with these statuses end after their headers, whatever the headers announce.
_WITHOUT_BODY = (http.client.NO_CONTENT, http.client.NOT_MODIFIED)
#: The time at which the current exchange of this thread must have ended.
deadline: ContextVar[float] = ContextVar("deadline")


def time_left_s() -> float:
    """Return the time left for the current exchange."""
    left = deadline.get() - monotonic()
    if left <= 0:
        raise TimeoutError("the request took too long")
    return left


class _BoundedReader(io.RawIOBase):
    """Reads a socket until the exchange must have ended.

    The time left for the exchange limits each wait. A time limit for each wait alone would let a
    server that sends a byte from time to time continue forever.
    """

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
        self.sock.settimeout(min(self._idle_s or time_left_s(), time_left_s()))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _ResponseReader(io.BufferedReader):
    """Reads one response.

    Bytes after the response's end may be in the buffer. They would be lost with the buffer, and the
    following bytes would be taken for the response to the next request. The socket is shut down
    then, so that it is not used again.
    """

    raw: _BoundedReader

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
        self.fp = _ResponseReader(_BoundedReader(self.fp.detach(), sock))

    def _read_status(self) -> tuple[str, int, str]:
        """Return the status line of the final response.

        `http.client` skips only status 100, and without a limit. Another interim response would be
        the result of this request, and the final response the result of the next request.
        """
        for _ in range(MAX_INTERIM_RESPONSES + 1):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200 or status == http.client.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(
            f"more than {MAX_INTERIM_RESPONSES} interim responses (status 1xx)"
        )

    def begin(self) -> None:
        super().begin()
        self.will_close = (
            self.will_close
            or self.status == http.client.SWITCHING_PROTOCOLS
            or not self._is_framed()
            or (self.status in _WITHOUT_BODY and self._announces_body())
        )

    def _is_framed(self) -> bool:
        """Return whether the headers state in exactly one way where the response ends."""
        codings, lengths = (
            self.headers.get_all(name, []) for name in ("Transfer-Encoding", "Content-Length")
        )
        if codings:
            return len(codings) == 1 and codings[0].lower() == "chunked" and not lengths
        return not lengths or (
            len(lengths) == 1 and re.fullmatch("[0-9]{1,18}", lengths[0]) is not None
        )

    def _announces_body(self) -> bool:
        """Return whether the headers announce bytes that the receiver may still send."""
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"


class _CheckedReuse:
    """Reuses a connection only if nothing arrived after the last response, not even inside TLS."""

    @property
    def is_connected(self) -> bool:
        sock = self.sock  # type: ignore[attr-defined]
        has_more = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        return not has_more and super().is_connected  # type: ignore[misc]


class _Connection(_CheckedReuse, HTTPConnection):
    response_class = _Response


class _TLSConnection(_CheckedReuse, HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class Adapter(HTTPAdapter):
    """The open connections of a process.

    It is used without a `requests.Session`, which would add cookies, .netrc and the environment's
    proxies, and read redirects to their end.
    """

    def __init__(self, ca_file: str, in_flight: int) -> None:
        # All connections share it: reading the certificate authorities takes as long as 40
        # callbacks.
        self._tls = ssl.create_default_context(cafile=ca_file or DEFAULT_CA_BUNDLE_PATH)
        super().__init__(
            pool_connections=MAX_OPEN_CONNECTIONS, pool_maxsize=max(MAX_OPEN_CONNECTIONS, in_flight)
        )

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}

    def build_connection_pool_key_attributes(
        self, request: PreparedRequest, verify: Any, cert: Any = None
    ) -> Any:
        host, _ = super().build_connection_pool_key_attributes(request, verify, cert)
        # Without TLS the name only separates hosts that share an address: each has connections of
        # its own.
        kind = {"server_hostname": urlsplit(f"//{request.headers['Host']}").hostname}
        return host, {**kind, "ssl_context": self._tls} if host["scheme"] == "https" else kind

    def cert_verify(self, *_: Any) -> None:
        """Do nothing: the TLS context has the certificate authorities."""
