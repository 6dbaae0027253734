"""A TCP proxy for tests and benchmarks: it simulates network faults and distant servers, and counts
round trips.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from sqlalchemy import make_url

#: Inspects the bytes of one direction of a numbered connection. If it returns True, the connection
#: is broken before the bytes are passed on.
Cut = Callable[[int, bytes], bool]


class Proxy:
    """Passes connections on, unless a fault is active.

    `refuse`, `swallow` and `heal` last until the next call. `reset` closes open connections,
    `strand` makes them hang. `cut_answer` and `cut_after` take effect once. `delay_s` is the time
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
        self._listen()

    def url(self, url: str) -> str:
        """Return `url` with this proxy instead of its host."""
        return re.sub(r"^(\w[\w+]*://(?:[^/@]*@)?)[^/?]*", rf"\g<1>{self.host}:{self.port}", url)

    # -- faults -----------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Refuse new connections, and reset open ones."""
        self._close_listener()
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

    def reset(self) -> None:
        """Reset open connections without a regular close."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def cut_after(self, count: int) -> None:
        """Reset the next connection that has sent `count` bytes."""
        seen = 0

        def is_over(_: int, data: bytes) -> bool:
            nonlocal seen
            seen += len(data)
            return seen >= count

        self._cuts["request"].append(is_over)

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
            for source, target, direction in (
                (client, server, "request"),
                (server, client, "answer"),
            ):
                way = (source, target, direction, self.accepted, self._flows)
                threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        direction: str,
        number: int,
        flows: threading.Event,
    ) -> None:
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
