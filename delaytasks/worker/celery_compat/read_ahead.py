"""Takes several messages in each round trip from a distant broker on Redis.

kombu reads one message with each `BRPOP`, so a worker would receive ten messages a second if a
round trip takes 100 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import ResponseError

from delaytasks.core.clock import monotonic

#: Redis is distant if a round trip takes longer. A near one would only have more commands to
#: execute.
DISTANT_S = 0.005
#: The number of messages that one command takes. The others are left to other workers.
MESSAGES = 20

#: Makes a function that does not raise the errors that a malformed message causes.
Guarded = Callable[[Callable[..., Any]], Callable[..., Any]]


def read_ahead(channel: Any, prefix: str, guarded: Guarded) -> None:
    """Replace the functions with which kombu reads from `channel`.

    `prefix` begins the names of our queues.
    """
    ahead = ReadAhead(channel, prefix, guarded)
    channel._size = partial(ahead.timed, channel._size)
    channel._brpop_start = partial(ahead.ask, channel._brpop_start)
    # A channel that closes reads the answer to its last `BRPOP` by this method.
    read = guarded(channel._brpop_read)
    channel._brpop_read = partial(ahead.read, read, is_closing=True)
    channel.handlers["BRPOP"] = partial(ahead.read, read)


class ReadAhead:
    """Sends `RPOP` for each queue of delaytasks before each `BRPOP` of a channel.

    The messages of these queues are not acknowledged, so their number is not limited.
    """

    def __init__(self, channel: Any, prefix: str, guarded: Guarded) -> None:
        self._channel = channel
        self._prefix = prefix
        self._deliver = guarded(self._deliver_one)
        self._round_trip_s = float("inf")
        #: The queues whose answers have not been read, in the order of the commands.
        self._asked: list[str] = []

    def timed(self, size: Callable[[str], int], queue: str) -> int:
        """Measure a round trip: kombu asks for the length of each queue that it declares."""
        began = monotonic()
        length = size(queue)
        self._round_trip_s = min(self._round_trip_s, monotonic() - began)
        return length

    def ask(self, start: Callable[..., None], *timeout: Any) -> None:
        """Ask for messages of our queues, if Redis is distant, and then for one as kombu does."""
        is_distant = DISTANT_S < self._round_trip_s < float("inf")
        queues = self._channel.active_queues if is_distant else ()
        ours = [queue for queue in queues if queue.startswith(self._prefix)]
        connection = self._channel.client.connection
        for queue in ours:
            key = self._channel.global_keyprefix + self._channel._q_for_pri(queue, 0)
            connection.send_command("RPOP", key, MESSAGES)
        self._asked = ours
        start(*timeout)

    def read(
        self, read_one: Callable[..., Any], *, is_closing: bool = False, **options: Any
    ) -> Any:
        """Deliver the messages that were asked for ahead, and then the one of `BRPOP`.

        Unless the channel is closing, do not wait for the answer to the `BRPOP` if it has not
        arrived together with the other ones.
        """
        connection, asked, self._asked = self._channel.client.connection, self._asked, []
        found = []
        try:
            for queue in asked:
                found += [(queue, message) for message in self._answer(connection)]
            if asked and not is_closing and not connection.can_read(timeout=0):
                return None
        except self._channel.connection_errors:
            connection.disconnect()  # as kombu does, which then connects again
            raise
        finally:
            for queue, message in found:
                self._deliver(queue, message)
        return read_one(**options)

    def _answer(self, connection: Any) -> Collection[bytes]:
        try:
            return self._channel.client.parse_response(connection, "RPOP") or ()
        except ResponseError:
            # Redis is older than 6.2, or refuses the key, as it then also does for `BRPOP`.
            self._round_trip_s = 0.0
            return ()

    def _deliver_one(self, queue: str, message: bytes) -> None:
        self._channel.connection._deliver(loads(bytes_to_str(message)), queue)
