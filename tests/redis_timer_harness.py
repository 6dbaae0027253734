"""A Redis timer with a manual clock, for tests on a real Redis."""

from __future__ import annotations

import secrets
from datetime import datetime, timezone
from typing import Any

from celery import Celery

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.settings import Settings
from delaytasks.timers.arming import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.timers.redis_timer import RedisTimer, Taken, redis_location
from tests.manual_clock import ManualClock


class RedisTimerHarness:
    """A timer with a private namespace and a manual clock."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, **settings: Any) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.events = Events()
        usual = {"timer": "redis", "namespace": "t" + secrets.token_hex(4), "publish_limit_s": 10}
        self.settings = Settings(**{**usual, **settings})
        publisher = Publisher(Celery(broker="memory://"), self.settings.namespace, 0.5, self.events)
        location = redis_location(url, None, options)
        self.timer = RedisTimer(
            location, self.settings, EtaTimer(publisher, self.clock), self.clock, self.events
        )

    def entry(self, id: int, in_ms: float = 0, **fields: Any) -> Entry:
        return Entry(
            id, fields.pop("version", 0), self.clock.now_us() + int(in_ms * 1000), **fields
        )

    def take(self, most: int = 100, queue: str = "default") -> list[Taken]:
        taken = self.timer.take(dict.fromkeys(self.timer.slots(queue), most))
        assert taken is not None
        return taken

    def take_ids(self, most: int = 100) -> list[int]:
        return sorted(entry.id for some in self.take(most) for entry in some.entries)

    def members(self, which: str) -> list[bytes]:
        client, index = self.timer.link.connect(), ("store", "prepare").index(which)
        keys = [self.timer.keys(slot)[index] for slot in self.timer.slots("default")]
        return [member for key in keys for member in client.zrange(key, 0, -1) if member != b"."]

    def close(self) -> None:
        client = self.timer.link.connect()
        for key in client.scan_iter(f"*{self.settings.namespace}*", count=1000):
            client.delete(key)
        self.timer.link.close()
