"""A TCP proxy for tests and benchmarks: it simulates network faults and distant servers, and counts
round trips. Below it is a web server whose answers a test chooses.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from sqlalchemy import make_url

#: Inspects the bytes of one direction of a numbered connection. If it returns True, the connection
#: is broken before the bytes are passed on.
Cut = Callable[[int, bytes], bool]


class Proxy:
    """Passes connections on, unless a fault is active.

    `refuse`, `swallow` and `heal` last until the next call. `reset` closes open connections,
    `strand` makes them hang. `cut_request` and `cut_answer` take effect once. `delay_s` is the time
    that bytes take in each direction, so a round trip takes twice as long.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self._cuts: dict[str, list[Cut]] = {"request": [], "answer": []}
        self.delay_s = 0.0
        #: The numbers of accepted connections and of connections broken by a cut.
        self.accepted = 0
        self.cut = 0
        #: The number of answers. Several requests that were sent before the first answer are one
        #: round trip, and a request without an answer is none.
        self.round_trips = 0
        self._asking: set[int] = set()
        self._listener: socket.socket | None = None
        self.host, self.port = "127.0.0.1", 0
        self._reserved = socket.socket()
        self._listen()

    def url(self, url: str) -> str:
        """Return `url` with this proxy instead of its host."""
        return re.sub(r"^(\w[\w+]*://(?:[^/@]*@)?)[^/?]*", rf"\g<1>{self.host}:{self.port}", url)

    # -- faults -----------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Refuse new connections, and reset open ones."""
        self._close_listener()
        # Nobody else gets the port meanwhile. A socket that does not listen refuses connections.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((self.host, self.port))
        self.reset()

    def swallow(self) -> None:
        """Act as a black hole: accept connections, but pass no byte on."""
        self._flows.clear()

    def strand(self) -> None:
        """Leave open connections without any data from now on; new connections work."""
        self._flows.clear()
        self._flows = threading.Event()
        self._flows.set()

    def heal(self) -> None:
        self.delay_s = 0.0
        self._cuts = {"request": [], "answer": []}
        self._flows.set()
        if self._listener is None:
            self._listen()
            self._reserved.close()

    def reset(self) -> None:
        """Reset open connections without a regular close."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def cut_request(self, pattern: bytes) -> None:
        """Drop the next request that matches, and reset its connection."""
        self._cuts["request"].append(lambda _, data: re.search(pattern, data) is not None)

    def cut_answer(self, pattern: bytes) -> None:
        """Pass the next request that matches on, but reset the connection instead of passing on its
        answer.
        """
        asked: set[int] = set()

        def note(number: int, data: bytes) -> bool:
            if not asked and re.search(pattern, data):
                asked.add(number)
            return False

        self._cuts["request"].append(note)
        self._cuts["answer"].append(lambda number, _: number in asked)

    def close(self) -> None:
        self._close_listener()
        self._reserved.close()
        self._flows.set()
        self.reset()

    # -- implementation ---------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener = socket.create_server((self.host, self.port), backlog=100)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
            for ends, direction in (((client, server), "request"), ((server, client), "answer")):
                way = (*ends, direction, self.accepted, self._flows)
                threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, direction: str, number: int,
        flows: threading.Event,
    ) -> None:  # fmt: skip
        try:
            for data in self._delayed(source, direction, number):
                flows.wait()
                if self._cuts_now(number, data, direction):
                    break
                target.sendall(data)
            else:
                target.shutdown(socket.SHUT_WR)
                return
        except (OSError, ValueError):  # a closed socket has a negative number
            pass  # if one end is closed, close the other
        _reset(source)
        _reset(target)

    def _delayed(self, source: socket.socket, direction: str, number: int) -> Iterator[bytes]:
        """Yield each piece of data `delay_s` after its arrival, in the order of arrival."""
        waiting: deque[tuple[float, bytes]] = deque()
        while True:
            remaining_s = waiting[0][0] - time.monotonic() if waiting else None
            if remaining_s is not None and not _is_readable_within(source, remaining_s):
                yield waiting.popleft()[1]
                continue
            data = source.recv(65536)
            if not data:
                break
            self._count(direction, number)
            waiting.append((time.monotonic() + self.delay_s, data))
        for leaves_at, data in waiting:
            threading.Event().wait(leaves_at - time.monotonic())
            yield data

    def _count(self, direction: str, number: int) -> None:
        with self._lock:
            if direction == "request":
                self._asking.add(number)
            elif number in self._asking:
                self._asking.discard(number)
                self.round_trips += 1

    def _cuts_now(self, number: int, data: bytes, direction: str) -> bool:
        if not self._cuts[direction]:
            return False
        with self._lock:
            for is_over in self._cuts[direction]:
                if is_over(number, data):
                    self._cuts[direction].remove(is_over)
                    self.cut += 1
                    return True
        return False


def proxy_to(url: str) -> Proxy:
    place = make_url(url)
    ports = {"redis": 6379, "amqp": 5672, "postgresql": 5432, "mysql": 3306}
    return Proxy(place.host or "127.0.0.1", place.port or ports[place.get_backend_name()])


def _is_readable_within(source: socket.socket, seconds: float) -> bool:
    if seconds <= 0:
        return False
    poll = select.poll()  # `select` fails for the file descriptors above 1023
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _reset(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)  # wakes its reader
    except OSError:
        pass  # it is closed already
    end.close()


# -- A web server for tests with configurable answers, valid and invalid ones ---------------------


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
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.web.received.append(Request(self.path, headers, body))
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
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()

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
