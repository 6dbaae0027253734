"""The timer `redis`: near rows in two sorted sets per slot, taken in two phases.

Producers and the sweep write by `RedisTimer`. The `RedisPoller` of each worker takes what is due,
and no more than the dispatcher has capacity for, so that a burst spreads over all workers.
"""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha1
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs
from zlib import crc32

import redis
from redis import ConnectionPool, RedisError
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import parse_url
from redis.exceptions import NoScriptError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from delaytasks.broker.link import CONNECT_STEP_S
from delaytasks.events import Events
from delaytasks.loops import SERVICE_REST_S, Availability, Loop
from delaytasks.model.clock import MAX_ID, Clock, fork_safe, monotonic
from delaytasks.model.errors import ConfigError
from delaytasks.model.filters import batches
from delaytasks.model.inputs import MAX_PRIORITY
from delaytasks.model.task import Entry, Timer, by_queue
from delaytasks.model.text import Secret, mask_secret
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

FAILURES = (RedisError, RedisClusterException, OSError)
#: The number of further nodes of a cluster on which a command is tried.
CLUSTER_RETRIES = 2
SENTINEL = "sentinel://"
_SCHEMES = ("redis://", "rediss://", "unix://")
_SENTINEL_PORT = 26379


class RedisLocation(NamedTuple):
    """One or more URLs. Several URLs are nodes of one cluster, or with a `primary`, Sentinels."""

    urls: tuple[str, ...]
    #: The name of the primary at the Sentinels.
    primary: str = ""
    #: Options of the connections to Sentinels, such as a password.
    sentinel_options: Mapping[str, Any] = {}

    def connect(self, options: Mapping[str, Any]) -> Any:
        """Return a client."""
        if self.primary:
            return self._ask_sentinels(options)
        failure: BaseException | None = None
        for url in self.urls:
            client = redis.Redis.from_url(url, **options)
            try:
                if client.info("cluster").get("cluster_enabled"):
                    # It tries other nodes if the first one is down.
                    retry = Retry(NoBackoff(), CLUSTER_RETRIES)
                    return RedisCluster.from_url(url, **{**options, "retry": retry})
            except FAILURES as error:
                failure = failure or error
            else:
                if url == self.urls[0]:
                    return client
                # All processes must use the same server. A server that is not a node of a cluster
                # is used only if its URL is the first one.
            client.close()
        raise failure or redis.ConnectionError("the first Redis does not answer")

    def _ask_sentinels(self, options: Mapping[str, Any]) -> Any:
        read = [
            parse_url(url.partition("?")[0].replace(SENTINEL, "redis://", 1)) for url in self.urls
        ]
        nodes = [(one.get("host", "localhost"), one.get("port", _SENTINEL_PORT)) for one in read]
        # As in Celery, the user, the password and the number of the database apply to the server.
        own = {
            name: value
            for one in reversed(read)
            for name, value in one.items()
            if name not in ("host", "port")
        }
        sentinels = Sentinel(
            nodes, sentinel_kwargs={**options, **self.sentinel_options}, **{**own, **options}
        )
        return sentinels.master_for(self.primary)


def broker_urls(broker_url: Any) -> list[str]:
    """The URLs of `broker_url`, which is a list, or a text with semicolons between URLs."""
    if isinstance(broker_url, (list, tuple)):
        return [url for each in broker_url for url in broker_urls(each)]
    return [url.strip() for url in str(broker_url or "").split(";") if url.strip()]


def redis_location(
    given: str, broker_url: Any, transport_options: Mapping[str, Any] | None = None
) -> RedisLocation:
    """Return the location in `given`, the URL of the setting `timer`, or else in the broker's URL.

    Raises `ConfigError` if it is not a Redis.
    """
    where = "delaytasks_timer" if given else "the broker's URL"
    urls = tuple(_readable(url) for url in broker_urls(given or broker_url))
    is_sentinel = bool(urls) and all(url.startswith(SENTINEL) for url in urls)
    if not urls or not (is_sentinel or all(url.startswith(_SCHEMES) for url in urls)):
        found = ";".join(map(mask_secret, urls)) or "empty"
        raise ConfigError(
            f"this timer needs a Redis, and {where} is {found}: set delaytasks_timer to redis://…, "
            "rediss://…, unix://… or sentinel://…, with ';' between several URLs"
        )
    for url in urls:
        try:
            # This reads the URL without connecting.
            pool = ConnectionPool.from_url(
                url.partition("?")[0].replace(SENTINEL, "redis://") if is_sentinel else url
            )
            pool.make_connection()
        except (ValueError, TypeError, RedisError):  # their messages may quote a password
            raise ConfigError(
                f"the timer cannot read {where}: the form is "
                "redis://user:password@host:6379/0, with the password's special characters written "
                "as %…, and with options of redis-py"
            ) from None
    if not is_sentinel:
        return RedisLocation(urls)
    options = transport_options or {}
    named = [
        name for url in urls for name in parse_qs(url.partition("?")[2]).get("master_name", ())
    ]
    primary = str((named or [options.get("master_name") or ""])[0])
    if not primary:
        raise ConfigError(
            f"delaytasks_timer = 'redis' needs the name of the primary at the Sentinels of "
            f"{where}: add ?master_name=… to the URL, or master_name to broker_transport_options"
        )
    return RedisLocation(urls, primary, options.get("sentinel_kwargs") or {})


def _readable(url: str) -> str:
    """Return a URL in the form of redis-py, which differs from kombu's for sockets and TLS."""
    if url.startswith("redis+socket://"):
        url = url.replace("redis+socket://", "unix://").replace("virtual_host=", "db=")
    return Secret(re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda found: found[1].lower(), url))


# -- The scripts of the `redis` timer. Redis runs each script as one step -------------------------

# A slot has two sorted sets. In `store` entries wait, with the due time in milliseconds as score.
# In `prepare` are the entries that a Redis poller took and has not handed on yet. Their score is
# the time at which they return to `store` if the poller never deletes them. The last member of
# `store` is always ".", which distinguishes an empty slot from one that Redis lost.


#: The members in one call. Lua's stack has room for a few thousand values.
MAX_ENTRIES = 1000

#: Adds entries to a slot; repeating the call has no effect.
#:
#: KEYS: store. ARGV: channel, the slot's name, then score and member of each entry, the
#: earliest first. Pollers are notified only if the first entry of the slot changed, or Redis had
#: lost the slot.
ARM = """
local is_lost = not redis.call('ZSCORE', KEYS[1], '.')
local is_earliest = redis.call('ZCOUNT', KEYS[1], '-inf', ARGV[3]) == 0
redis.call('ZADD', KEYS[1], unpack(ARGV, 3))
if is_lost or is_earliest then
  redis.call('PUBLISH', ARGV[1], ARGV[2] .. ' ' .. (is_lost and 0 or ARGV[3]))
end
"""

#: Moves due entries from `store` to `prepare`, and returns them.
#:
#: KEYS: store, prepare. ARGV: now, the time before which an entry is too late, the time up to which
#: entries are taken, the time at which entries that are not handed on return, the number of
#: entries. The answer: whether Redis had lost the slot; the number of entries that returned; the
#: number of entries that were too late; due times and members; the next times in both sets.
TAKE = f"""
local store, prepare, now, late, soon = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
-- This write takes no memory. After it, a Redis that is full allows the other writes, so that
-- entries can leave.
redis.call('ZREM', prepare, '.')
local was_lost = redis.call('ZADD', store, 'NX', '+inf', '.')

local stale = redis.call('ZRANGEBYSCORE', prepare, '-inf', now, 'LIMIT', 0, {MAX_ENTRIES})
for _, member in ipairs(stale) do
  redis.call('ZADD', store, now, member)
  redis.call('ZREM', prepare, member)
end
local dropped = redis.call('ZREMRANGEBYSCORE', store, '-inf', '(' .. late)

local due = redis.call('ZRANGEBYSCORE', store, '-inf', soon, 'WITHSCORES', 'LIMIT', 0, ARGV[5])
if #due > 0 then
  local moved = {{}}
  for i = 1, #due, 2 do moved[i], moved[i + 1] = ARGV[4], due[i] end
  redis.call('ZADD', prepare, unpack(moved))
  redis.call('ZREMRANGEBYRANK', store, 0, #due / 2 - 1)
end

local waiting = redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2]
local prepared = redis.call('ZRANGE', prepare, 0, 0, 'WITHSCORES')[2] or 'inf'
return {{was_lost, #stale, dropped, table.concat(due, ' '), waiting, prepared}}
"""


# -- The connection of the `redis` timer to a server or a cluster, with time limits ---------------


T = TypeVar("T")


#: redis-py sends a PING on a connection that was idle for this time before it uses the connection.
IDLE_CHECK_S = 15
#: The name of each script in Redis.
_NAMES = {
    script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (ARM, TAKE)
}


def call(client: Any, script: str) -> tuple[str, str]:
    """Return the first words of a command that runs `script`.

    The command contains the script's name, since sending its text takes longer than running it. The
    pipelines of redis-py's cluster client refuse names, and get the text.
    """
    return ("EVAL", script) if isinstance(client, RedisCluster) else ("EVALSHA", _NAMES[script])


class RedisLink:
    """A connection for all threads, which is reset after a fork. Its sockets limit each step."""

    def __init__(self, location: RedisLocation, limit_s: float, events: Events) -> None:
        self._location = location
        self._limit_s = limit_s
        self._redis = Availability(
            lambda error: events.emit("timer.down", timer="redis", error=error),
            lambda: events.emit("timer.up", timer="redis"),
        )
        #: The number of failures, for subscribers: they have connections of their own.
        self.failures = 0
        fork_safe(self)

    def after_fork(self) -> None:
        self._connecting = threading.Lock()
        self._client: Any = None

    @property
    def url(self) -> str:
        return ";".join(self._location.urls)

    @property
    def is_up(self) -> bool:
        return self._redis.is_up

    def attempt(self, work: Callable[[Any], T]) -> T | None:
        """Return `work(client)`, or None if Redis does not answer. It rests after a failure."""
        if self._redis.is_resting:
            return None
        try:
            answer = _with_scripts(self.connect(), work)
        except FAILURES as error:
            if isinstance(self._client, RedisCluster):
                # The default node locates the keys of scripts, and may be the one that is down.
                self._client.replace_default_node()
            self.failures += 1
            self._redis.failed(f"{type(error).__name__}: {error}")
            return None
        self._redis.answered()
        return answer

    def connect(self) -> Any:
        """Return the client, after connecting if necessary."""
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> Any:
        options: dict[str, Any] = {
            "socket_timeout": self._limit_s,
            "socket_connect_timeout": max(CONNECT_STEP_S, self._limit_s),
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": IDLE_CHECK_S,  # for subscriptions, which send nothing else
            "protocol": 2,
        }
        return self._location.connect(options)


def _with_scripts(client: Any, work: Callable[[Any], T]) -> T:
    """Return `work(client)`, after loading the scripts if Redis does not have them."""
    try:
        return work(client)
    except NoScriptError:
        for script in _NAMES:
            client.script_load(script)
        return work(client)


# -- redis ----------------------------------------------------------------------------------------

# The `redis` timer: tasks wait in sorted sets of Redis, from which the workers' Redis pollers take
# them.


#: An entry that a poller took and did not hand on within this time returns: the poller has died.
RETURN_S = 2.0
#: The ticket of a poller is a time within this range after that.
TICKETS_MS = 100.0
#: Pollers take entries this long before they are due, and keep them until then. No entry travels at
#: the moment when it is due.
AHEAD_MS = 100
#: A member and its score in an answer of `TAKE`. The table's columns cannot store more digits.
_ENTRY = re.compile(rb"(?<!\S)(\d{1,19}):(\d{1,18}) (\d{1,14}(?:\.\d{1,9})?)(?!\S)")


class Slot(NamedTuple):
    """A part of the entries of a queue. In a cluster each slot may be on another node.

    Entries without a priority are distributed by their ids. Each higher priority has a slot of its
    own, which is emptied first.
    """

    queue: str
    name: str
    priority: int = 0


class Taken(NamedTuple):
    """The result of `take`. The poller hands the entries on, and deletes them by the ticket."""

    slot: Slot
    entries: list[Entry]
    #: The score of the entries in `prepare`, which no other call has; 0 without entries.
    ticket: float
    #: The number of malformed entries.
    refused: int
    #: The number of entries that were too late. The table has their rows.
    dropped: int
    #: The number of entries that another poller had taken and not handed on.
    returned: int
    #: Whether Redis had lost the slot.
    was_lost: bool
    #: The time of the next entry in milliseconds, or infinity.
    next_ms: float


class RedisTimer:
    """Thread-safe. A call that fails is not repeated, since the sweep finds the rows."""

    def __init__(
        self, location: RedisLocation, settings: Settings, eta: Timer, clock: Clock, events: Events
    ) -> None:
        self.link = RedisLink(location, settings.publish_limit_s, events)
        self._settings = settings
        self._eta = eta
        self._clock = clock
        self._slots: dict[str, list[Slot]] = {}

    def close(self) -> None:
        self.link.close()

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    def is_reachable(self) -> bool:
        """Ask whether Redis answers, in a cluster each of its primaries."""

        def work(client: Any) -> Any:
            is_cluster = isinstance(client, RedisCluster)
            return client.ping(target_nodes="primaries") if is_cluster else client.ping()

        return self.link.attempt(work) is not None

    # -- keys -------------------------------------------------------------------------------------

    def slots(self, queue: str) -> list[Slot]:
        found = self._slots.get(queue)
        if found is None:
            found = [Slot(queue, str(number)) for number in range(self._settings.redis_slots)]
            levels = range(1, MAX_PRIORITY + 1)
            found += [Slot(queue, f"p{priority}", priority) for priority in levels]
            self._slots[queue] = found
        return found

    def slot(self, entry: Entry) -> Slot:
        slots = self.slots(entry.queue)
        if entry.priority:
            return slots[entry.priority - 1 - MAX_PRIORITY]
        return slots[crc32(b"%d" % entry.id) & self._settings.redis_slots - 1]

    def keys(self, slot: Slot) -> tuple[str, str]:
        """Return the keys of `store` and `prepare`. Their hash tag keeps both on one node."""
        tag = f"{{{self._settings.namespace}.{slot.queue}.{slot.name}}}"
        return f"{tag}.store", f"{tag}.prepare"

    def channel(self, queue: str) -> str:
        """Return the channel that announces entries which are due first in their slot."""
        return f"{self._settings.namespace}.{queue}.earlier"

    def _by_slot(self, entries: Iterable[Entry]) -> dict[Slot, list[Entry]]:
        found: dict[Slot, list[Entry]] = {}
        for queued in by_queue(entries).values():
            for entry in queued:
                found.setdefault(self.slot(entry), []).append(entry)
        return found

    # -- the timer --------------------------------------------------------------------------------

    def arm(self, entries: Iterable[Entry]) -> bool:
        slots = self._by_slot(entries)

        def work(client: Any) -> bool:
            pipe = client.pipeline(transaction=False)
            for slot, some in slots.items():
                some.sort(key=lambda entry: entry.due_us)
                for batch in batches(some, MAX_ENTRIES):
                    words: list[Any] = [self.channel(slot.queue), slot.name]
                    for entry in batch:
                        words += (entry.due_us / 1000, _member(entry))
                    pipe.execute_command(*call(client, ARM), 1, self.keys(slot)[0], *words)
            pipe.execute()
            return True

        return not slots or bool(self.link.attempt(work))

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return self._eta.request_drain(queue, priorities, messages, expires_s)

    # -- for Redis pollers ------------------------------------------------------------------------

    def take(
        self, most: Mapping[Slot, int], handed_on: Iterable[Taken], grace_of: Callable[[str], float]
    ) -> list[Taken] | None:
        """Take the entries of each slot that are due, or will be within `AHEAD_MS`.

        `most` limits the number of entries by slot. The entries of `handed_on`, the results of
        earlier calls, are deleted, and so are entries that are later than `grace_of` their queue.
        The caller owns the entries until it hands them on, or for `RETURN_S`. None if Redis is
        unavailable.
        """
        now = self._clock.now_us() / 1000  # pollers wake to the microsecond

        def work(client: Any) -> list[Taken]:
            pipe = client.pipeline(transaction=False)
            # Two calls of the same millisecond get the same ticket once in 400,000 times. One of
            # the pollers then deletes entries of the other one, which loses them only if that dies.
            ticket = now + RETURN_S * 1000 + random.uniform(0, TICKETS_MS)
            for slot, count in most.items():
                times = now, int(now) - int(grace_of(slot.queue) * 1000), now + AHEAD_MS, ticket
                pipe.execute_command(
                    *call(client, TAKE), 2, *self.keys(slot), *times, min(count, MAX_ENTRIES)
                )
            for some in handed_on:
                pipe.zremrangebyscore(self.keys(some.slot)[1], some.ticket, some.ticket)
            pairs = zip(most, pipe.execute(), strict=False)
            return [_taken(slot, ticket, answer) for slot, answer in pairs]

        return self.link.attempt(work)

    def listen(self, queues: Iterable[str]) -> Any:
        """Return a subscription to the channels of these queues."""
        listener = self.link.connect().pubsub(ignore_subscribe_messages=True)
        listener.subscribe(*map(self.channel, queues))
        return listener


def _member(entry: Entry) -> str:
    return f"{entry.id}:{entry.version}"


def _taken(slot: Slot, ticket: float, answer: Any) -> Taken:
    was_lost, returned, dropped, text, waiting, prepared = answer
    entries = [
        Entry(number, int(version), round(float(due_ms) * 1000), slot.queue, slot.priority)
        for id, version, due_ms in _ENTRY.findall(text)
        if 0 < (number := int(id)) <= MAX_ID
    ]
    return Taken(
        slot,
        entries,
        ticket if text else 0.0,
        len(text.split()) // 2 - len(entries),
        dropped,
        returned,
        bool(was_lost),
        min(float(waiting) - AHEAD_MS, float(prepared)),
    )


# -- The worker's part: takes entries that are due from Redis --------------------------------------

#: All slots are read this often, whatever was published: a message may be lost, a worker may die.
READ_ALL_S = 15.0
#: How often the listener checks whether the queues of the worker have changed.
LISTEN_S = 1.0
#: Entries that were passed on are deleted together with the next read, or after this time. That is
#: well before Redis would return them.
DELETE_S = RETURN_S / 4
#: A slot with this time is read in the next turn.
READ_NOW = 0.0


class RedisPoller:
    """Reads slots of Redis in one loop, and listens for entries that are due earlier in another.

    The first loop rests until shortly before the next known entry is due, and until there is
    capacity for it.
    """

    def __init__(self, worker: WorkerRuntime, timer: RedisTimer) -> None:
        self._timer = timer
        self._worker = worker
        self._clock = worker.runtime.clock
        self._events = events = worker.runtime.events
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._lock = threading.Lock()
        #: When each slot should be read, in milliseconds.
        self._read_at: dict[Slot, float] = {}
        #: The due times of entries that were taken before these times, in microseconds of `clock`.
        self._ahead: list[int] = []
        self._queues: list[str] = []
        #: The entries that Redis should delete, and the latest time for it.
        self._passed_on: list[Taken] = []
        self._delete_at = 0.0
        self._read_all_at = 0.0
        self._was_down = False
        self._poll_loop = Loop("redis_poller", self._poll, events)
        self._listen_loop = Loop("redis_listener", self._listen, events)
        self.loops = [self._poll_loop, self._listen_loop]

    def stop(self) -> None:
        """Wait until everything that was taken has been passed on. The listener ends by itself."""
        self._listen_loop.stop(0)
        self._poll_loop.stop()
        self._timer.take({}, self._passed_on, self._dispatcher.grace_s)

    # -- polling ----------------------------------------------------------------------------------

    def _poll(self) -> float:
        wanted, rest_s = self._slots_to_read()
        if not wanted:
            delete_in_s = self._delete_at - monotonic() if self._passed_on else inf
            if delete_in_s > 0:
                return min(rest_s, delete_in_s)
        passed_on, self._passed_on = self._passed_on, []
        try:
            taken = self._timer.take(wanted, passed_on, self._dispatcher.grace_s)
            if taken is None:
                self._was_down = True
                self._read_all_soon()
                return SERVICE_REST_S
            with self._lock:
                for some in taken:  # an earlier time may have been published meanwhile
                    self._read_at[some.slot] = min(self._read_at[some.slot], some.next_ms)
            self._pass_on(taken)
        except BaseException:
            self._read_all_soon()
            raise
        if self._was_down or any(some.was_lost for some in taken):
            self._was_down = False
            self._read_all_soon()
            self._worker.sweep_loop.arm_again()
        return 0

    def _slots_to_read(self) -> tuple[dict[Slot, int], float]:
        """Return how many entries to take of each slot that is due, or how long to rest at most."""
        # First, or capacity that comes meanwhile would be missed.
        self._dispatcher.on_capacity = self._poll_loop.wake
        now_us = self._clock.now_us()
        # If the clock was set back, entries may wait for hours again. They use no capacity.
        latest_us = now_us + AHEAD_MS * 1000
        self._ahead = [due_us for due_us in self._ahead if now_us < due_us <= latest_us]
        capacity = self._dispatcher.capacity(len(self._ahead))
        with self._lock:
            self._follow_queues()
            rest_s = self._read_all_at - monotonic()
            if rest_s <= 0:
                self._read_all_at, rest_s = monotonic() + READ_ALL_S, READ_ALL_S
                self._read_at = dict.fromkeys(self._read_at, READ_NOW)
            due = {slot: at for slot, at in self._read_at.items() if at * 1000 <= now_us}
            if due and capacity:
                wanted = {slot: 0 for slot, at in due.items() if at == READ_NOW}
                wanted |= share(min(capacity, MAX_ENTRIES), due)
                self._read_at |= dict.fromkeys(wanted, inf)
                return wanted, 0
            if not due:
                self._dispatcher.on_capacity = None
                next_ms = min(self._read_at.values(), default=inf)
                rest_s = min(rest_s, (next_ms * 1000 - now_us) / 1e6)
            return {}, rest_s

    def _pass_on(self, taken: list[Taken]) -> None:
        entries = list(chain.from_iterable(some.entries for some in taken))
        self._ahead += [entry.due_us for entry in entries]
        self._dispatcher.receive(entries)
        self._passed_on = [some for some in taken if some.ticket]
        self._delete_at = monotonic() + DELETE_S
        for some in taken:
            if some.dropped:
                self._events.emit("entry.late", count=some.dropped)
                self._dispatcher.start_drain(some.slot.queue, [some.slot.priority])
            if some.refused:
                error = ValueError(f"{some.refused} entries are not of our form")
                self._events.refuse("redis", error)
            if some.returned:
                self._events.emit("entry.returned", count=some.returned)

    def _follow_queues(self) -> None:
        """Read the slots of the queues that the worker serves now. The caller has the lock."""
        queues = self._processes.queues
        if queues != self._queues:
            self._queues = queues
            slots = [slot for queue in queues for slot in self._timer.slots(queue)]
            self._read_at = {slot: self._read_at.get(slot, READ_NOW) for slot in slots}

    def _read_all_soon(self) -> None:
        """Read all slots in the next turn. While Redis is down that turn comes after a rest."""
        with self._lock:
            self._read_at = dict.fromkeys(self._read_at, READ_NOW)

    # -- listening --------------------------------------------------------------------------------

    def _listen(self) -> float:
        """Listen until the connection breaks or the queues change.

        Producers publish the time of an entry that is due before all others in its slot.
        """
        link, queues, failures = self._timer.link, self._processes.queues, self._timer.link.failures
        if not queues:
            return SERVICE_REST_S
        channels = {self._timer.channel(queue): self._timer.slots(queue) for queue in queues}
        slots = {
            (channel.encode(), slot.name.encode()): slot
            for channel, some in channels.items()
            for slot in some
        }
        try:
            listener = self._timer.listen(queues)
            try:
                self._read_all_soon()  # nothing was heard until now
                self._poll_loop.wake()
                while self._listen_loop.is_running and (queues, failures) == (
                    self._processes.queues,
                    link.failures,
                ):
                    message = listener.get_message(timeout=LISTEN_S)
                    if message is not None:
                        self._receive(message, slots)
            finally:
                listener.close()
        except (*FAILURES, ValueError):  # ValueError if the connection is closed meanwhile
            return SERVICE_REST_S  # the poll loop reports that Redis is down, with the error
        return 0

    def _receive(
        self, message: Mapping[str, bytes], slots: Mapping[tuple[bytes, bytes], Slot]
    ) -> None:
        try:
            name, due = message["data"].split()
            slot, due_ms = slots[message["channel"], name], float(due)
            if not math.isfinite(due_ms):
                raise ValueError("no time")
        except (KeyError, ValueError):  # any client of Redis can publish there
            error = ValueError(f"not of our form, on {message['channel']!r:.200}")
            self._events.refuse("redis", error)
            return
        with self._lock:
            read_at = max(due_ms - AHEAD_MS, READ_NOW)
            is_earlier = read_at < self._read_at.get(slot, READ_NOW)
            if is_earlier:
                self._read_at[slot] = read_at
        if is_earlier:
            self._poll_loop.wake()


def share(capacity: int, due: Mapping[Slot, float]) -> dict[Slot, int]:
    """Return how many entries to take of each slot that is due.

    Only slots of the highest priority are read, those that were due first come first, and there
    are no more slots than there is capacity.
    """
    highest = max(slot.priority for slot in due)
    slots = [slot for slot in due if slot.priority == highest]
    random.shuffle(slots)  # or all workers would read the same one
    slots = sorted(slots, key=due.__getitem__)[:capacity]
    return dict.fromkeys(slots, -(-capacity // len(slots)))
