"""Programs that talk HTTP with a worker or the console.

`python -m benchmarks.clients receiver MILLISECONDS` answers each POST after that delay. It prints
its port and, for each line on stdin, how many requests came and how many waited simultaneously.

`python -m benchmarks.clients viewers URL COUNT` reads the page as often as that many browsers that
show it. It prints `ready` when all of them have read it once, and for each line on stdin how many
answers came and how many were errors.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import urllib.request

_ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
#: Seconds between two reads, as in console.js.
LIVE_S = 5.0
#: The header in which the console gets the name of the viewer.
USER = "X-Bench-User"


class ReceiverProtocol(asyncio.Protocol):
    """The minimal HTTP parsing that a POST of a well-behaved client needs."""

    received = waiting = most = 0

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        counts = ReceiverProtocol
        counts.received += 1
        counts.waiting += 1
        counts.most = max(counts.most, counts.waiting)
        asyncio.get_running_loop().call_later(self._delay_s, self._answer)

    def _answer(self) -> None:
        ReceiverProtocol.waiting -= 1
        self._transport.write(_ANSWER)


async def receive(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: ReceiverProtocol(delay_s), "127.0.0.1", 0, backlog=1024
    )
    print("port", server.sockets[0].getsockname()[1], flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print("received", ReceiverProtocol.received, ReceiverProtocol.most, flush=True)


def view(url: str, count: int) -> None:
    request = urllib.request.Request(url, headers={USER: "viewer", "HX-Request": "true"})
    lock, counts = threading.Lock(), {True: 0, False: 0}

    def look(number: int) -> None:
        time.sleep(LIVE_S * number / count)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    is_shown = b'id="live"' in answer.read()
            except OSError:
                is_shown = False
            with lock:
                counts[is_shown] += 1
            time.sleep(LIVE_S)

    for number in range(count):
        threading.Thread(target=look, args=(number,), daemon=True).start()
    while sum(counts.values()) < count:
        time.sleep(0.05)
    print("ready", flush=True)
    for _ in sys.stdin:
        print("answers", counts[True], counts[False], flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "receiver":
        asyncio.run(receive(float(sys.argv[2]) / 1000))
    else:
        view(sys.argv[2], int(sys.argv[3]))
