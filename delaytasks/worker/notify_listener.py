"""Hears what a shard's database tells of tasks that are scheduled for soon, and knows whether it can hear anything.

A pooler may take a LISTEN and tell nothing, and a connection may be dead for minutes before anybody says so. So it
tells something itself now and then, as producers do, and hears as long as that comes back.
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
    from delaytasks.sharding.shard import Shard
    from delaytasks.storage.notices import Listener

WAIT_S = 1.0
#: How often it makes sure that it hears, how long an answer may take, and how long it rests after it heard nothing.
CHECK_S, ANSWER_S, REST_S = 30.0, 2.0, 5.0
_CHECK = "check "


class NotifyListener:
    def __init__(
        self,
        shard: Shard,
        events: Events,
        heard: Callable[[Sequence[Entry]], object],
        look: Callable[[], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        self._shard = shard
        self._events = events
        self._heard = heard
        self._look = look
        self._refuse = refuse
        self._listener: Listener | None = None
        self._check = _CHECK + secrets.token_hex(4)
        self._checked_at = self._asked_at = float("-inf")
        self._is_deaf = False
        #: Whether nothing is missed.
        self.hears = False
        self.loop = Loop(
            shard.named("ear"), self._turn, events, stuck_s=10.0, reconnect=self._hang_up
        )

    def stop(self) -> None:
        self.loop.stop(0)

    def _turn(self) -> float | None:
        if not self._shard.store.notices.is_possible:
            return None
        try:
            if self._listener is None:
                self._listener = self._shard.store.notices.listen()
                self._checked_at = self._asked_at = float("-inf")
                if self._listener is None:
                    return None  # this driver can not
            self._make_sure()
            for payload in self._listener.wait(WAIT_S):
                self._take_in(payload)
            if not self.loop.is_running:
                self._hang_up()
            return 0
        except Exception as error:  # each driver has errors of its own, and all mean the same
            self._tell_deaf(f"{type(error).__name__}: {error}")
            self._hang_up()
            return REST_S

    def _make_sure(self) -> None:
        now = monotonic()
        if self._asked_at > self._checked_at:
            if now - self._asked_at > ANSWER_S:
                raise TimeoutError("what is told does not come back: is there a pooler in between?")
        elif now - self._checked_at > CHECK_S:
            self._asked_at = now
            self._shard.store.notices.tell([self._check])

    def _take_in(self, payload: str) -> None:
        if payload == self._check:
            self._checked_at = monotonic()
            if not self.hears:
                self._tell_hearing()
        elif payload == LOOK:
            self._look()
        elif not payload.startswith(_CHECK):  # another worker's
            try:
                entries = read_notice(payload)
            except (ValueError, TypeError, RecursionError) as error:  # anybody may tell something
                self._refuse(error)
            else:
                self._heard(entries)

    def _tell_hearing(self) -> None:
        self.hears, self._is_deaf = True, False
        self._events.emit("notices.up", shard=self._shard.number)
        self._look()

    def _tell_deaf(self, error: str) -> None:
        self.hears = False
        if not self._is_deaf:
            self._events.emit("notices.down", shard=self._shard.number, error=error)
        self._is_deaf = True
        self._look()

    def _hang_up(self) -> None:
        listener, self._listener, self.hears = self._listener, None, False
        if listener is not None:
            self._events.attempt(self.loop.name, "hang up", listener.close)
