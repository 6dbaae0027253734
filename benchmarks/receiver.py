"""A receiver of callbacks: `python -m benchmarks.receiver MILLISECONDS`.

It answers each POST after that delay. It prints its port and, for each line on stdin, how many
requests came and how many waited simultaneously.
"""

from __future__ import annotations

import asyncio
import re
import sys

_ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Counts:
    received = waiting = most = 0


class ReceiverProtocol(asyncio.Protocol):
    """The minimal HTTP parsing that a POST of a well-behaved client needs."""

    def __init__(self, delay_s: float, counts: Counts) -> None:
        self._delay_s = delay_s
        self._counts = counts
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
        counts = self._counts
        counts.received += 1
        counts.waiting += 1
        counts.most = max(counts.most, counts.waiting)
        asyncio.get_running_loop().call_later(self._delay_s, self._answer)

    def _answer(self) -> None:
        self._counts.waiting -= 1
        self._transport.write(_ANSWER)


async def receive(delay_s: float) -> None:
    loop, counts = asyncio.get_running_loop(), Counts()
    server = await loop.create_server(
        lambda: ReceiverProtocol(delay_s, counts), "127.0.0.1", 0, backlog=1024
    )
    print("port", server.sockets[0].getsockname()[1], flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print("received", counts.received, counts.most, flush=True)


if __name__ == "__main__":
    asyncio.run(receive(float(sys.argv[1]) / 1000))
