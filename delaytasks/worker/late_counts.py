"""Counts that the pool's processes send to their main process after the report of a chunk."""

from __future__ import annotations

import pickle
import select
import socket
from collections.abc import Callable, Iterator

from delaytasks.core.run_counts import RunStatistics

#: The longest message: the counts and the failures of all tags of a process.
MAX_COUNTS_BYTES = 1 << 20
#: How long a process waits if the main process has not read earlier messages yet. It reads once a
#: second.
SEND_WAIT_S = 3.0


class LateCounts:
    """A chunk may end after its report: another thread settles it, or some of its rows run longer.

    If no other chunk of the process follows, no report would bring its counts. A pool gives no way
    to ask one of its processes for them, so the process sends them by itself. Messages are
    datagrams, which need no lock that a killed process might hold.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_COUNTS_BYTES)
        self._reader.setblocking(False)

    def send(self, shard: int, take: Callable[[], RunStatistics]) -> None:
        """Send what `take` returns, unless the main process does not read."""
        if select.select([], [self._writer], [], SEND_WAIT_S)[1]:
            statistics = take()
            if statistics.tags:
                self._writer.send(pickle.dumps((shard, statistics)))

    def received(self) -> Iterator[tuple[int, RunStatistics]]:
        """Yield shard and counts of each message that has arrived."""
        while True:
            try:
                message = self._reader.recv(MAX_COUNTS_BYTES)
            except BlockingIOError:
                return
            yield pickle.loads(message)
