"""The connection of the `redis` timer: in bounded time, to servers and clusters, with an eye on what is wrong."""

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

from delaytasks.core.availability import Availability
from delaytasks.core.bounded_calls import within
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import ConfigError
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.timers.redis_location import FAILURES, RedisLocation
from delaytasks.timers.redis_scripts import ARM, TAKE

T = TypeVar("T")


class RestingError(redis.ConnectionError):
    """Nothing is tried for a while, since Redis has just not answered."""


#: A call that takes less than this part of the time limit says that all is well.
QUICK = 0.1
#: A connection that was idle for so long is tried first.
CHECK_S = 15
#: The first step of connecting may take this long, as to the broker.
CONNECT_STEP_S = 2.0
#: So many calls that nobody waits for any more may be under way.
MOST_IN_BACKGROUND = 50
OLDEST = (6, 2)
_NAMES = {
    script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (ARM, TAKE)
}


def call(client: Any, script: str) -> tuple[str, str]:
    """The beginning of a command. By the script's name, since to send its text takes longer than to run it; but
    pipelines of redis-py's cluster client refuse that."""
    return ("EVAL", script) if isinstance(client, RedisCluster) else ("EVALSHA", _NAMES[script])


class RedisLink:
    """Thread-safe, and made anew after a fork."""

    def __init__(self, place: RedisLocation, limit_s: float, events: Events) -> None:
        self._place = place
        self._limit_s = limit_s
        self._events = events
        self._redis = Availability(
            lambda error: events.emit("timer.down", timer="redis", error=error),
            lambda: events.emit("timer.up", timer="redis"),
        )
        #: How often it failed: whoever listens on a connection of its own hears nothing of that.
        self.failures = 0
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._client: Any = None
        #: Nodes of a cluster, as its last client found them: any of them leads to the others.
        self._known: list[ClusterNode] = []
        self._in_background = 0
        self._is_quick = False
        #: A caller has waited in vain for work that goes on: until some of it is over nobody else waits.
        self._is_late = False

    @property
    def url(self) -> str:
        return ";".join(self._place.urls)

    @property
    def is_up(self) -> bool:
        return self._redis.is_up and not self._is_late

    def attempt(self, work: Callable[[Any], T]) -> T | None:
        """What `work(client)` answers; None if Redis is away, or does not answer within the time limit.

        While all is well each step is bounded by its socket, and the caller takes them. Otherwise a thread does, and
        finishes the work even when the caller no longer waits: what it sends is as good as before.
        """
        if self._redis.is_resting:
            return None
        if self._is_quick and self._client is not None:
            return self._try(work)
        with self._lock:
            if self._in_background >= MOST_IN_BACKGROUND:
                return None
            self._in_background += 1
            patience_s = 0 if self._is_late else self._limit_s
        try:
            return within(patience_s, lambda: self._try_in_background(work), is_kept=True)
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
        self._is_quick = monotonic() - began < self._limit_s * QUICK
        self._redis.answered()
        return answer

    def connect(self) -> Any:
        """The client; a new one if there is none. `RestingError` if another thread has just failed to make one."""
        if self._client is None:
            with self._connecting:
                if self._redis.is_resting:
                    raise RestingError("another thread has just tried to connect")
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def check(self) -> None:
        """For a worker that starts: `ConfigError` if this Redis is too old; an event if it may drop what waits."""
        for info in self.attempt(_infos) or ():
            version = str(info["redis_version"])
            if tuple(map(int, version.split(".")[:2])) < OLDEST:
                needed = ".".join(map(str, OLDEST))
                raise ConfigError(
                    f"delaytasks_timer = 'redis' needs Redis {needed} or Valkey, and this one is {version}"
                )
            policy = str(info["maxmemory_policy"])
            if info["maxmemory"] and policy.startswith("allkeys"):
                remedy = (
                    "set maxmemory-policy to noeviction, or to volatile-…: our keys never expire"
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
            "health_check_interval": CHECK_S,  # a subscription whose other end is gone hears nothing of that
            "protocol": 2,
        }
        try:
            client = self._place.connect(options, self._known)
        except FAILURES:
            if not self._known:
                raise
            client = self._place.connect(options)  # the cluster may have moved to other nodes
        if isinstance(client, RedisCluster):
            self._known = client.get_nodes()
        return client

    def _drop(self, client: Any) -> None:
        """After a failure. A cluster's client finds the nodes that are left, and a Sentinel's the new primary."""
        if isinstance(client, RedisCluster):
            client.replace_default_node()  # which is asked where the keys of each script are, and may be the one away
        elif not self._place.primary:
            self._client = None


def execute(pipe: Any) -> list[Any]:
    """The answers. A key that is of another type is no reason to give up on all others: its answer is the error."""
    answers: list[Any] = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not is_wrong_type(answer):
            raise answer
    return answers


def is_wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and "WRONGTYPE" in str(answer)


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
