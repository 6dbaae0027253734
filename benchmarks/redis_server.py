"""The Redis server of a run: for the redis timer, and as the broker if that is Redis.

Its database must contain no other keys. The keys of the run are deleted afterwards.
"""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.processes import free_port
from benchmarks.settings import BARE_QUEUE, NAMESPACES, redis_url
from benchmarks.waiting import BenchError, wait_until
from tests.services import redis_program

#: The last prefixes belong to Celery and kombu.
_KEYS = (
    *(f"{opening}{namespace}." for namespace in NAMESPACES.values() for opening in ("", "{")),
    *(BARE_QUEUE, "bench_idle", "_kombu.binding", "unacked", "celery", "reply.celery"),
)
_client: Any = Redis.from_url(redis_url(), decode_responses=True)


def is_up() -> bool:
    """Return whether the server answers.

    With another broker, only the cases with the redis timer need it.
    """
    try:
        return bool(_client.ping())
    except RedisError:
        return False


def check() -> None:
    """Refuse a database with other keys, which would distort the figures."""
    strange = [key for key in _client.scan_iter(count=1000) if not _is_ours(key)]
    if strange:
        raise BenchError(
            f"{redis_url()} contains other keys ({', '.join(strange[:3])}, …): "
            "set DELAYTASKS_BENCH_BROKER_URL or, with another broker, "
            "DELAYTASKS_BENCH_REDIS_URL to an empty Redis database"
        )


def clear() -> None:
    keys = _our_keys()
    if keys:
        _client.delete(*keys)


def version() -> str:
    return f"Redis {_client.info('server')['redis_version']}"


def cpu_s() -> float:
    """Return the CPU time of the server, including the work for other clients."""
    found = _client.info("cpu")
    return float(found["used_cpu_sys"]) + float(found["used_cpu_user"])


def memory_bytes() -> int:
    """Return the memory of the server, including the data of other clients."""
    return int(_client.info("memory")["used_memory"])


def bytes_held() -> int:
    """Return the memory of the benchmark's keys."""
    return sum(_client.memory_usage(key, samples=0) or 0 for key in _our_keys())


def near_entries() -> int:
    """Return the number of entries in the redis timer.

    Each of its sets has a last member that is not an entry.
    """
    keys = _client.scan_iter(f"{{{NAMESPACES['redis']}.*.store", count=1000)
    return sum(_client.zcount(key, "-inf", "(+inf") for key in keys)


@contextmanager
def watching(word: str) -> Iterator[Callable[[], int]]:
    """Count the messages with `word` that any client sends to the benchmark's queues."""
    count = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal count
        while not is_over.is_set():
            command = monitor.next_command()["command"]
            count += command.startswith(pushes) and word in command

    pushes = tuple(f"LPUSH {namespace}." for namespace in NAMESPACES.values())
    with _client.monitor() as monitor:
        thread = threading.Thread(target=watch, name="bench-watch", daemon=True)
        thread.start()
        try:
            yield lambda: count
        finally:
            is_over.set()
            _client.ping()  # the monitor sees this command and ends
            thread.join()


class PrivateRedisServer:
    """A Redis server for this run only."""

    def __init__(self, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self._client: Any = Redis.from_url(self.url, decode_responses=True)

    def answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except RedisError:
            return False

    def commands(self) -> Counter[str]:
        """Return the number of commands by name, without those of this process."""
        found = self._client.info("commandstats")
        counts = Counter(
            {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()}
        )
        del counts["info"]
        return counts


@contextmanager
def private(folder: Path) -> Iterator[PrivateRedisServer]:
    """Start a server, and remove it with its data at the end."""
    found = redis_program()
    assert found is not None
    port = free_port()
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(
        [found, *options], stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            server = PrivateRedisServer(port)
            wait_until(server.answers, 15, "the private Redis server")
            yield server
        finally:
            process.kill()


def _our_keys() -> list[str]:
    return [key for key in _client.scan_iter(count=1000) if _is_ours(key)]


def _is_ours(key: str) -> bool:
    # Replies of `ping` wait in a queue with a random id.
    return key.startswith(_KEYS) or key.endswith(("reply.celery.pidbox", ".pidbox"))
