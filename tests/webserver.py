"""A web server for tests with configurable answers, valid and invalid ones."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

#: Writes an answer, which may be invalid.
Answer = Callable[["Exchange"], None]


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


def answer(status: int = 200, body: bytes = b"", **headers: str) -> Answer:
    """Return a valid answer. Underscores in header names become hyphens."""

    def write(exchange: Exchange) -> None:
        exchange.send_response(status)
        for name, value in headers.items():
            exchange.send_header(name.replace("_", "-"), value)
        exchange.send_header("Content-Length", str(len(body)))
        exchange.end_headers()
        exchange.wfile.write(body)

    return write


def drip(head: bytes, drop: bytes) -> Answer:
    """Return an answer that sends `head`, then `drop` at short intervals forever."""

    def write(exchange: Exchange) -> None:
        exchange.wfile.write(head)
        while not exchange.web.closing.wait(0.05):
            exchange.wfile.write(drop)

    return write


def pour(head: bytes, exchange: Exchange) -> None:
    """Send `head`, then as many bytes as the client accepts."""
    exchange.wfile.write(head)
    while not exchange.web.closing.is_set():
        exchange.wfile.write(b"x" * 65536)


def hang(exchange: Exchange) -> None:
    exchange.web.closing.wait()


def reset(exchange: Exchange) -> None:
    """Close the connection by a reset."""
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.close_connection = True


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: Send data immediately, without waiting for the previous packet's acknowledgement.
    disable_nagle_algorithm = True
    web: WebServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.web.received.append(
            Request(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
        )
        write = self.web.answers.get(self.path.partition("?")[0], answer())
        try:
            write(self)
        except OSError:
            self.close_connection = True  # the client has disconnected

    def log_message(self, *_: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None: ...


class WebServer:
    """A server on a port of 127.0.0.1, with TLS if a context is given.

    `answers` maps paths to answers; the default is status 200.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.received: list[Request] = []
        self.closing = threading.Event()
        #: The number of accepted connections.
        self.accepted = 0
        handler = type("Handler", (Exchange,), {"web": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._take_in, self._server.get_request = self._server.get_request, self._count  # type: ignore[method-assign]
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def url(self, path: str = "/", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _count(self) -> tuple[socket.socket, object]:
        taken = self._take_in()
        self.accepted += 1
        return taken
