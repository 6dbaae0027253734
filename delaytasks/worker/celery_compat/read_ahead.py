"""Takes several messages in each round trip from a distant broker on Redis.

kombu reads one message with each `BRPOP`, so a worker would receive ten messages a second if a
round trip takes 100 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from delaytasks.core.clock import monotonic

#: Redis is distant if a round trip takes longer. A near one would only have more commands to
#: execute.
DISTANT_S = 0.005
#: The number of messages that one command takes. The others are left to other workers.
MESSAGES = 20


class ReadAhead:
    """Sends `RPOP` for each queue of delaytasks before each `BRPOP` of a channel.

    The messages of these queues are not acknowledged, so their number is not limited.
    """

    def __init__(self, channel: Any, prefix: str, deliver: Callable[[str, bytes], None]) -> None:
        """`prefix` begins the names of our queues, and `deliver` takes a queue and a message."""
        self._channel = channel
        self._prefix = prefix
        self._deliver = deliver
        self._parse = channel.client.parse_response
        self._round_trip_s = float("inf")
        #: The queues whose answers have not been read, in the order of the commands.
        self._asked: list[str] = []
        channel._size = partial(self._timed, channel._size)

    def ask(self, queues: Collection[str]) -> None:
        """Ask for messages of those of the queues that are ours, if Redis is distant."""
        is_distant = DISTANT_S < self._round_trip_s < float("inf")
        ours = [queue for queue in queues if is_distant and queue.startswith(self._prefix)]
        connection = self._channel.client.connection
        for queue in ours:
            key = self._channel.global_keyprefix + self._channel._q_for_pri(queue, 0)
            connection.send_command("RPOP", key, MESSAGES)
        self._asked = ours

    def read(self) -> bool:
        """Deliver the messages of the last answers, which arrive together.

        Return True if messages were asked for ahead and the answer to the `BRPOP` has not arrived.
        """
        connection, asked, self._asked = self._channel.client.connection, self._asked, []
        found = []
        try:
            for queue in asked:
                found += [(queue, message) for message in self._answer(connection)]
            is_waiting = bool(asked) and not connection.can_read(timeout=0)
        except self._channel.connection_errors:
            connection.disconnect()  # as kombu does, which then connects again
            raise
        finally:
            for queue, message in found:
                self._deliver(queue, message)
        return is_waiting

    def _answer(self, connection: Any) -> Collection[bytes]:
        try:
            return self._parse(connection, "RPOP") or ()
        except ResponseError:
            # Redis is older than 6.2, or refuses the key, as it then also does for `BRPOP`.
            self._round_trip_s = 0.0
            return ()

    def _timed(self, size: Callable[[str], int], queue: str) -> int:
        """Measure a round trip: kombu asks for the length of each queue that it declares."""
        began = monotonic()
        length = size(queue)
        self._round_trip_s = min(self._round_trip_s, monotonic() - began)
        return length
