"""The connection of the `redis` timer to a server or a cluster, with time limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import sha1
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry

from delaytasks.core.clock import monotonic, reset_in_child
from delaytasks.core.errors import ConfigError
from delaytasks.core.events import Events
from delaytasks.core.loop import Availability, within
from delaytasks.timers.broker_link import CONNECT_STEP_S, WRONG_TYPE, is_quick
from delaytasks.timers.redis_location import FAILURES, RedisLocation
from delaytasks.timers.redis_scripts import ARM, TAKE

T = TypeVar("T")


class RestingError(redis.ConnectionError):
    """Another thread has just failed to reach Redis, so nothing is tried now."""


#: redis-py sends a PING on a connection that was idle for this time before it uses the connection.
IDLE_CHECK_S = 15
#: The number of calls that may go on after their callers reached the time limit.
MAX_BACKGROUND_CALLS = 50
#: The oldest supported release of Redis.
OLDEST_TIMER_REDIS = (6, 2)
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
    """A connection for all threads, which is reset after a fork."""

    def __init__(self, location: RedisLocation, limit_s: float, events: Events) -> None:
        self._location = location
        self._limit_s = limit_s
        self._events = events
        self._redis = Availability(
            lambda error: events.emit("timer.down", timer="redis", error=error),
            lambda: events.emit("timer.up", timer="redis"),
        )
        #: The number of failures, for subscribers: they have connections of their own.
        self.failures = 0
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._client: Any = None
        #: The nodes of a cluster that its last client found. Each of them knows the others.
        self._known: list[ClusterNode] = []
        self._in_background = 0
        self._is_quick = False
        #: Whether a caller reached its time limit. Until a call in the background ends, no caller
        #: waits.
        self._is_late = False

    @property
    def url(self) -> str:
        return ";".join(self._location.urls)

    @property
    def is_up(self) -> bool:
        return self._redis.is_up and not self._is_late

    def attempt(self, work: Callable[[Any], T]) -> T | None:
        """Return `work(client)`, or None if Redis does not answer within the time limit.

        While Redis is quick, the caller does the work, and its socket limits each step. Otherwise a
        thread does the work, and finishes it even if the caller no longer waits.
        """
        if self._redis.is_resting:
            return None
        if self._is_quick and self._client is not None:
            return self._try(work)
        with self._lock:
            if self._in_background >= MAX_BACKGROUND_CALLS:
                return None
            self._in_background += 1
            wait_s = 0 if self._is_late else self._limit_s
        try:
            return within(wait_s, lambda: self._try_in_background(work), is_kept=True)
        except TimeoutError:
            with self._lock:
                self._is_late = self._in_background > 0
            return None

    def _try_in_background(self, work: Callable[[Any], T]) -> T | None:
        try:
            return self._try(work)
        finally:
            with self._lock:
                self._in_background -= 1
                self._is_late = False

    def _try(self, work: Callable[[Any], T]) -> T | None:
        client = self._client
        try:
            client = self.connect()
            began = monotonic()
            answer = _with_scripts(client, work)
        except RestingError:
            return None
        except FAILURES as error:
            self._is_quick = False
            self._drop(client)
            self.failures += 1
            self._redis.failed(f"{type(error).__name__}: {error}")
            return None
        self._is_quick = is_quick(monotonic() - began, self._limit_s)
        self._redis.answered()
        return answer

    def connect(self) -> Any:
        """Return the client, after connecting if necessary.

        Raises `RestingError` if another thread has just failed to connect.
        """
        if self._client is None:
            with self._connecting:
                if self._redis.is_resting:
                    raise RestingError("another thread has just tried to connect")
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def check(self) -> None:
        """Raise `ConfigError` if this Redis is too old, and emit an event if it may evict entries.

        A worker calls this at start.
        """
        for info in self.attempt(_infos) or ():
            version = str(info["redis_version"])
            if tuple(map(int, version.split(".")[:2])) < OLDEST_TIMER_REDIS:
                needed = ".".join(map(str, OLDEST_TIMER_REDIS))
                raise ConfigError(
                    f"delaytasks_timer = 'redis' needs Redis {needed} or Valkey, and this one is "
                    f"{version}"
                )
            policy = str(info["maxmemory_policy"])
            if info["maxmemory"] and policy.startswith("allkeys"):
                remedy = (
                    "set maxmemory-policy to noeviction, or to volatile-…, since the timer's keys "
                    "never expire"
                )
                self._events.emit("timer.evicts", policy=policy, remedy=remedy)

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
        try:
            client = self._location.connect(options, self._known)
        except FAILURES:
            if not self._known:
                raise
            client = self._location.connect(options)  # the cluster may have moved to other nodes
        if isinstance(client, RedisCluster):
            self._known = client.get_nodes()
        return client

    def _drop(self, client: Any) -> None:
        """Prepare for another attempt after a failure.

        A cluster's client finds the other nodes by itself, and a Sentinel's client the new primary.
        """
        if isinstance(client, RedisCluster):
            # The default node locates the keys of scripts, and may be the one that is down.
            client.replace_default_node()
        elif not self._location.primary:
            self._client = None


def execute(pipe: Any) -> list[Any]:
    """Return the answers, where the answer for a key of another type is an error.

    Other errors are raised.
    """
    answers: list[Any] = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not is_wrong_type(answer):
            raise answer
    return answers


def is_wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and WRONG_TYPE in str(answer)


def _with_scripts(client: Any, work: Callable[[Any], T]) -> T:
    """Return `work(client)`, after loading the scripts if Redis does not have them."""
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
