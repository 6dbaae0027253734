"""A TCP proxy for tests: what a network does to a connection, on demand."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable

from sqlalchemy import make_url

#: Looks at the bytes of one direction of a connection, which has a number; True breaks the connection before they are
#: passed on.
Cut = Callable[[int, bytes], bool]


class Proxy:
    """Listens on a port of its own and passes everything on, until it is told to misbehave.

    `refuse`, `swallow` and `heal` hold from then on; `reset` ends what is open, `strand` lets it hang; `cut_answer`
    and `cut_after` wait for their moment and then happen once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self._cuts: dict[str, list[Cut]] = {"request": [], "answer": []}
        self.delay_s = 0.0
        #: Connections taken in, and connections broken by a cut.
        self.accepted = 0
        self.cut = 0
        self._listener: socket.socket | None = None
        self.host, self.port = "127.0.0.1", 0
        self._listen()

    def url(self, url: str) -> str:
        """`url` with this proxy in the place of its host."""
        return re.sub(r"^(\w[\w+]*://(?:[^/@]*@)?)[^/?]*", rf"\g<1>{self.host}:{self.port}", url)

    # -- what it can do ---------------------------------------------------------------------------

    def refuse(self) -> None:
        """Nobody listens any more, and what was open is reset."""
        self._close_listener()
        self.reset()

    def swallow(self) -> None:
        """A black hole: connections are taken in, and no byte comes through either way."""
        self._flows.clear()

    def strand(self) -> None:
        """What is open stays so for ever, and hears nothing any more; new connections work."""
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
        """Ends what is open, without a goodbye."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def cut_after(self, count: int) -> None:
        """The next connection that has sent so many bytes is reset."""
        seen = 0

        def is_over(_: int, data: bytes) -> bool:
            nonlocal seen
            seen += len(data)
            return seen >= count

        self._cuts["request"].append(is_over)

    def cut_request(self, pattern: bytes) -> None:
        """The next request that matches is not passed on, and its connection is reset."""
        self._cuts["request"].append(lambda _, data: re.search(pattern, data) is not None)

    def cut_answer(self, pattern: bytes) -> None:
        """The next request that matches is passed on; when its answer comes, the connection is reset instead."""
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

    # -- inside -----------------------------------------------------------------------------------

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
            while data := source.recv(65536):
                if self.delay_s:
                    threading.Event().wait(self.delay_s)
                flows.wait()
                if self._cuts_now(number, data, direction):
                    break
                target.sendall(data)
            else:
                target.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass  # one end is gone: so is the other
        _reset(source)
        _reset(target)

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


def _reset(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)  # wakes whoever reads from it
    except OSError:
        pass  # it is gone already
    end.close()
