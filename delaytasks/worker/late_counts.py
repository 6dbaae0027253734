"""Counts that the pool's processes send to their main process after the report of a chunk."""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator

from delaytasks.core.run_counts import RunStatistics

#: The longest message: the counts and the failures of all tags of a process.
MAX_COUNTS_BYTES = 1 << 20
#: The time until the next try if the main process, which reads once a second, has not read earlier
#: messages yet.
SEND_AGAIN_S = 1.5


class LateCounts:
    """A chunk may end after its report: another thread settles it, or some of its rows run longer.

    If no other chunk of the process follows, or that chunk runs long, no report would bring its
    counts soon. A pool gives no way to ask one of its processes for them, so the process sends them
    by itself. Messages are datagrams, which need no lock that a killed process might hold.

    Parameters
    ----------
    on_error
        Reports the error of a message that is too long to be sent or read. Its counts are lost.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_COUNTS_BYTES)
        self._reader.setblocking(False)
        #: The shards whose next try is to come.
        self._waiting: set[int] = set()

    def send(self, shard: int, take: Callable[[], RunStatistics]) -> None:
        """Send what `take` returns, without waiting: the caller gives rows back in time."""
        poll = select.poll()
        poll.register(self._writer, select.POLLOUT)
        if poll.poll(0):
            statistics = take()
            if statistics.tags:
                try:
                    self._writer.send(pickle.dumps((shard, statistics)))
                except OSError as error:
                    self._on_error(error)
        elif shard not in self._waiting:
            self._waiting.add(shard)
            again = threading.Timer(SEND_AGAIN_S, self._send_again, (shard, take))
            again.daemon = True
            again.start()

    def _send_again(self, shard: int, take: Callable[[], RunStatistics]) -> None:
        self._waiting.discard(shard)
        self.send(shard, take)

    def received(self) -> Iterator[tuple[int, RunStatistics]]:
        """Yield shard and counts of each message that has arrived."""
        while True:
            try:
                message = self._reader.recv(MAX_COUNTS_BYTES)
            except BlockingIOError:
                return
            try:
                shard, statistics = pickle.loads(message)
            except Exception as error:  # a truncated message may raise any error
                self._on_error(error)
                continue
            yield shard, statistics
