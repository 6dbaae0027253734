"""The `redis` timer: near tasks wait in sorted sets of Redis, where every worker sees them, and movers in the workers
take what falls due."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha1
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import NoScriptError, RedisClusterException, RedisError
from redis.retry import Retry

from delaytasks.core.bounded import within
from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.errors import ConfigError
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.core.ids import MAX_ID, shard_of
from delaytasks.core.inputs import MAX_PRIORITY, is_queue
from delaytasks.core.ports import Entry
from delaytasks.core.settings import Settings
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.scripts import ARM, LOT, TAKE

T = TypeVar("T")

#: After a failure nothing is tried for this long: callers must not wait for a Redis that is away.
REST_S = 1.0
#: What a mover took and has not handed on for so long goes back: the mover is dead.
RETURN_S = 2.0
#: A call that takes less than this part of the time limit says that all is well.
QUICK = 0.1
#: A connection that was idle for so long is tried first.
CHECK_S = 15
OLDEST = (6, 2)
#: redis-py's cluster client knows scripts in pipelines by their text only.
_NAMES = {script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (ARM, TAKE)}
#: A member and its score, as TAKE answers; of no more digits than the table's columns can hold.
_ENTRY = re.compile(rb"(?<!\S)(\d{1,19}):(\d{1,18})(?::(-?\d{1,4}))? (\d{1,14})(?!\S)")
FAILURES = (RedisError, RedisClusterException, OSError)


class Slot(NamedTuple):
    """A part of a queue's near tasks; in a cluster each may be on another node. Ordinary ones are spread by their ids;
    those of a higher priority have a slot of their own, which is emptied first."""

    queue: str
    name: str
    priority: int = 0


class Taken(NamedTuple):
    """What a mover has to hand on; then it is deleted by its ticket."""

    slot: Slot
    entries: list[Entry]
    ticket: int
    #: Entries that were not of our form.
    refused: int
    #: How many were too late, and their priorities: the table's business.
    dropped: int
    priorities: list[int]
    #: How many another mover had taken and not handed on.
    returned: int
    #: The slot was empty in a way that it never is: Redis lost it.
    was_lost: bool
    #: When there is something to do next, in milliseconds; infinite if there is nothing.
    next_ms: float


class RedisTimer:
    """Thread-safe, and made anew after a fork. What fails is not tried again: the database is the truth."""

    def __init__(self, url: str, settings: Settings, eta: EtaTimer, clocks: Sequence[Clock], events: Events) -> None:
        self.url = url
        self._settings = settings
        self._eta = eta
        #: Of each shard's database; slots go by the first one.
        self._clocks = clocks
        self._events = events
        self._slots: dict[str, list[Slot]] = {}
        self.is_up = True
        self._rests_until = 0.0
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._is_quick = False

    # -- where things are -------------------------------------------------------------------------

    def slots(self, queue: str) -> list[Slot]:
        found = self._slots.get(queue)
        if found is None:
            found = [Slot(queue, str(number)) for number in range(self._settings.redis_slots)]
            found += [Slot(queue, f"p{priority}", priority) for priority in range(1, MAX_PRIORITY + 1)]
            self._slots[queue] = found
        return found

    def slot(self, entry: Entry) -> Slot:
        slots = self._slots.get(entry.queue) or self.slots(entry.queue)
        if entry.priority > 0:
            return slots[min(entry.priority, MAX_PRIORITY) - 1 - MAX_PRIORITY]
        return slots[crc32(b"%d" % entry.id) & self._settings.redis_slots - 1]

    def keys(self, slot: Slot) -> tuple[str, str]:
        """Of what waits and of what is on its way. In a cluster one hash tag keeps both on one node."""
        tag = f"{{{self._settings.namespace}.{slot.queue}.{slot.name}}}"
        return f"{tag}.store", f"{tag}.prepare"

    def channel(self, queue: str) -> str:
        """Where movers hear of entries that are due before all others of their slot."""
        return f"{self._settings.namespace}.{queue}.earlier"

    def _by_slot(self, entries: Iterable[Entry]) -> dict[Slot, list[Entry]]:
        found: dict[Slot, list[Entry]] = {}
        for entry in entries:
            # Others are another program's: no worker would take them, and the table has their rows.
            if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0 and is_queue(entry.queue):
                found.setdefault(self.slot(entry), []).append(entry)
        return found

    def _shifted(self, entries: Iterable[Entry], sign: int) -> Iterable[Entry]:
        """Due by the first shard's clock (1) instead of their own one's, or the other way round (-1)."""
        if len(self._clocks) == 1:
            return entries
        now_us = self._clocks[0].now_us()
        ahead_us = {number: sign * (now_us - clock.now_us()) for number, clock in enumerate(self._clocks)}
        return [entry._replace(due_us=entry.due_us + ahead_us.get(shard_of(entry.id), 0)) for entry in entries]

    # -- the timer --------------------------------------------------------------------------------

    def arm(self, entries: Iterable[Entry]) -> bool:
        slots = self._by_slot(self._shifted(entries, 1))

        def work(client: Any) -> bool:
            pipe = client.pipeline(transaction=False)
            for slot, some in slots.items():
                some.sort(key=lambda entry: entry.due_us)
                for start in range(0, len(some), LOT):
                    words: list[Any] = [self.channel(slot.queue), slot.name]
                    for entry in some[start : start + LOT]:
                        words += (_due_ms(entry), _member(entry))
                    pipe.execute_command(*_call(client, ARM), 2, *self.keys(slot), *words)
            pipe.execute()
            return True

        return not slots or self._attempt(work) is not None

    def disarm(self, entries: Iterable[Entry]) -> None:
        slots = self._by_slot(entries)

        def work(client: Any) -> bool:
            pipe = client.pipeline(transaction=False)
            for slot, some in slots.items():
                for key in self.keys(slot):
                    pipe.zrem(key, *map(_member, some))
            pipe.execute()
            return True

        if slots:
            self._attempt(work)

    def drain(self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0) -> bool:
        return self._eta.drain(queue, priorities, tokens, expires_s, shard)

    # -- for movers -------------------------------------------------------------------------------

    def take(self, most: Mapping[Slot, int], handed_on: Iterable[Taken] = ()) -> list[Taken] | None:
        """What is due in each slot, so many entries at most: they are this mover's until it has handed them on, or
        RETURN_S is over. What it has handed on is deleted. None while Redis is away."""
        now_us = self._clocks[0].now_us()
        now, late = now_us // 1000, (now_us - int(self._settings.grace_s * 1e6)) // 1000
        back = now + int(RETURN_S * 1000)

        def work(client: Any) -> list[Taken]:
            pipe = client.pipeline(transaction=False)
            for slot, count in most.items():
                pipe.execute_command(*_call(client, TAKE), 2, *self.keys(slot), now, late, back, min(count, LOT))
            for some in handed_on:
                pipe.zremrangebyscore(self.keys(some.slot)[1], some.ticket, some.ticket)
            taken = [_taken(slot, answer) for slot, answer in zip(most, pipe.execute(), strict=False)]
            return [some._replace(entries=list(self._shifted(some.entries, -1))) for some in taken]

        return self._attempt(work)

    def listen(self, queues: Iterable[str]) -> Any:
        """A subscription to what is armed in these queues before all that waits."""
        listener = self.connect().pubsub(ignore_subscribe_messages=True)
        listener.subscribe(*map(self.channel, queues))
        return listener

    # -- for people -------------------------------------------------------------------------------

    def counts(self, queues: Sequence[str]) -> dict[str, tuple[int, int]] | None:
        """By queue: how many entries wait, and how many are on their way. None while Redis is away."""

        def work(client: Any) -> dict[str, tuple[int, int]]:
            pipe = client.pipeline(transaction=False)
            for queue in queues:
                for slot in self.slots(queue):
                    for key in self.keys(slot):
                        pipe.zcount(key, "-inf", "(+inf")
            numbers = iter(pipe.execute())
            pairs = {queue: [(next(numbers), next(numbers)) for _ in self.slots(queue)] for queue in queues}
            return {queue: (sum(p[0] for p in both), sum(p[1] for p in both)) for queue, both in pairs.items()}

        return self._attempt(work)

    def check(self) -> None:
        """For a worker that starts: `ConfigError` if this Redis is too old; an event if it may drop what waits."""
        for info in self._attempt(_infos) or ():
            version = str(info["redis_version"])
            if tuple(map(int, version.split(".")[:2])) < OLDEST:
                needed = ".".join(map(str, OLDEST))
                raise ConfigError(
                    f"delaytasks_timer = 'redis' needs Redis {needed} or Valkey, and this one is {version}"
                )
            policy = str(info["maxmemory_policy"])
            if info["maxmemory"] and policy.startswith("allkeys"):
                remedy = "set maxmemory-policy to noeviction, or to volatile-…: our keys never expire"
                self._events.emit("timer.evicts", policy=policy, remedy=remedy)

    # -- the connection ---------------------------------------------------------------------------

    def _attempt(self, work: Callable[[Any], T]) -> T | None:
        """What `work` answers, or None. While all is well each of its steps is bounded by its socket; else what may
        take many steps must not hold up the caller."""
        began, client, limit_s = monotonic(), self._client, self._settings.publish_limit_s
        if began < self._rests_until:
            return None
        try:
            if client is not None and self._is_quick:
                answer = _with_scripts(client, work)
            else:
                answer = within(limit_s, lambda: _with_scripts(self.connect(), work))
        except FAILURES as error:
            self._client = None
            self._rests_until = monotonic() + REST_S
            if self.is_up:
                self.is_up = False
                self._events.emit("timer.down", timer="redis", error=f"{type(error).__name__}: {error}")
            return None
        self._is_quick = client is not None and monotonic() - began < limit_s * QUICK
        if not self.is_up:
            self.is_up = True
            self._events.emit("timer.up", timer="redis")
        return answer

    def connect(self) -> Any:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        step_s = self._settings.publish_limit_s / 2
        options: dict[str, Any] = {
            "socket_timeout": step_s,
            "socket_connect_timeout": step_s,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": CHECK_S,  # a subscription whose other end is gone hears nothing of that
            "protocol": 2,
        }
        client = redis.Redis.from_url(self.url, **options)
        if not client.info("cluster").get("cluster_enabled"):
            return client
        client.close()
        return RedisCluster.from_url(self.url, **options)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _call(client: Any, script: str) -> tuple[str, str]:
    """By its name where that can be: to send its text takes longer than to run it."""
    return ("EVAL", script) if isinstance(client, RedisCluster) else ("EVALSHA", _NAMES[script])


def _with_scripts(client: Any, work: Callable[[Any], T]) -> T:
    """`work(client)`, once more with the scripts if they are not known there."""
    try:
        return work(client)
    except NoScriptError:
        for script in _NAMES:
            client.script_load(script)
        return work(client)


def _infos(client: Any) -> list[dict[str, Any]]:
    if isinstance(client, RedisCluster):
        return list(client.info(target_nodes=RedisCluster.PRIMARIES).values())
    return [client.info()]


def _due_ms(entry: Entry) -> int:
    """Rounded up: never early."""
    return -(-entry.due_us // 1000)


def _member(entry: Entry) -> str:
    return f"{entry.id}:{entry.version}:{entry.priority}" if entry.priority else f"{entry.id}:{entry.version}"


def _taken(slot: Slot, answer: Any) -> Taken:
    was_lost, returned, dropped, levels, ticket, text, waiting, prepared = answer
    entries = [
        Entry(number, int(version), int(due_ms) * 1000, slot.queue, int(priority or 0))
        for id, version, priority, due_ms in _ENTRY.findall(text)
        if 0 < (number := int(id)) <= MAX_ID
    ]
    return Taken(
        slot,
        entries,
        ticket,
        len(text.split()) // 2 - len(entries),
        dropped,
        [int(level) for level in levels.split()],
        returned,
        bool(was_lost),
        min(float(waiting), float(prepared)),
    )
