"""Receives the notices of the database about tasks that are due soon.

A connection pooler may accept LISTEN and pass nothing on, and a broken connection may stay open for
minutes. So the listener sends a notice to itself from time to time, in the same way as producers.
The notices count as complete as long as these test notices arrive.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.loop import Loop
from delaytasks.timers.direct import LOOK, read_notice

if TYPE_CHECKING:
    from delaytasks.storage.notices import Listener, Notices

#: How long one turn waits for a notice.
NOTICE_WAIT_S = 1.0
#: The time between two test notices, and how long a test notice may take to arrive.
TEST_EVERY_S, TEST_ANSWER_S = 30.0, 2.0
#: How long the listener rests after a failure.
RECONNECT_REST_S = 5.0
#: A turn that takes longer is stuck.
LISTEN_STUCK_S = 10.0
_TEST_PREFIX = "check "


class NotifyListener:
    """`on_entries` gets the entries of a notice, and `on_wake` is called to read the table now."""

    def __init__(
        self,
        notices: Notices,
        events: Events,
        on_entries: Callable[[Sequence[Entry]], object],
        on_wake: Callable[[], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        self._notices = notices
        self._events = events
        self._on_entries = on_entries
        self._on_wake = on_wake
        self._refuse = refuse
        self._listener: Listener | None = None
        self._test_notice = _TEST_PREFIX + secrets.token_hex(4)
        self._test_arrived_at = self._test_sent_at = float("-inf")
        self._is_failure_reported = False
        #: Whether all notices arrive.
        self.is_listening = False
        self.loop = Loop("notify_listener", self._turn, events, LISTEN_STUCK_S, self._disconnect)

    def stop(self) -> None:
        self.loop.stop(0)

    def _turn(self) -> float | None:
        if not self._notices.is_possible:
            return None
        try:
            if self._listener is None:
                self._listener = self._notices.listen()
                self._test_arrived_at = self._test_sent_at = float("-inf")
                if self._listener is None:
                    return None  # this driver has no notices
            self._test_connection()
            for payload in self._listener.wait(NOTICE_WAIT_S):
                self._receive(payload)
            if not self.loop.is_running:
                self._disconnect()
            return 0
        except Exception as error:  # each driver has errors of its own
            self._report_failure(error)
            self._disconnect()
            return RECONNECT_REST_S

    def _test_connection(self) -> None:
        now = monotonic()
        if self._test_sent_at > self._test_arrived_at:
            if now - self._test_sent_at > TEST_ANSWER_S:
                raise TimeoutError(
                    "notices do not arrive: is there a connection pooler in between?"
                )
        elif now - self._test_arrived_at > TEST_EVERY_S:
            self._test_sent_at = now
            self._notices.send([self._test_notice])

    def _receive(self, payload: str) -> None:
        if payload == self._test_notice:
            self._test_arrived_at = monotonic()
            if not self.is_listening:
                self._report_success()
        elif payload == LOOK:
            self._on_wake()
        elif not payload.startswith(_TEST_PREFIX):  # else it is another worker's test
            try:
                entries = read_notice(payload)
            except (ValueError, TypeError, RecursionError) as error:
                self._refuse(error)  # any client of the database can send notices
            else:
                self._on_entries(entries)

    def _report_success(self) -> None:
        self.is_listening, self._is_failure_reported = True, False
        self._events.emit("notices.up")
        self._on_wake()

    def _report_failure(self, error: Exception) -> None:
        self.is_listening = False
        if not self._is_failure_reported:
            text = f"{type(error).__name__}: {error}"
            self._events.emit("notices.down", error=text, cause=error)
        self._is_failure_reported = True
        self._on_wake()

    def _disconnect(self) -> None:
        listener, self._listener, self.is_listening = self._listener, None, False
        if listener is not None:
            self._events.attempt(self.loop.name, "disconnect", listener.close)
