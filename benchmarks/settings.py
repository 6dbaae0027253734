"""The database, the broker and the namespaces of the benchmarks.

DELAYTASKS_BENCH_DATABASE_URL and DELAYTASKS_BENCH_BROKER_URL replace the local defaults.
"""

from __future__ import annotations

import os
from functools import cache

#: The namespace of each timer: deployments that share a database and a broker.
NAMESPACES = {"eta": "bench", "redis": "bench_redis", "direct": "bench_direct"}
TABLE_PREFIX = "bench_"
#: The queue of the bare Celery app.
BARE_QUEUE = "bench_bare"
#: A Redis database without other keys: a foreign key stops the run.
_BROKER = "redis://127.0.0.1:6379/5"
_DATABASE = "postgresql://postgres@127.0.0.1:5432/postgres"

# The URLs get names that are not settings of delaytasks, since every variable DELAYTASKS_* is a
# setting. Tests that import this module keep their own values.
for _name in [
    name for name in os.environ if name.startswith("DELAYTASKS_") and "_TEST_" not in name
]:
    _value = os.environ.pop(_name)
    if _name.startswith("DELAYTASKS_BENCH_"):
        os.environ[_name.removeprefix("DELAYTASKS_")] = _value


def database_url() -> str:
    return os.environ.get("BENCH_DATABASE_URL", _DATABASE)


def broker_url() -> str:
    return os.environ.get("BENCH_BROKER_URL", _BROKER)


def redis_url() -> str:
    """Return the Redis of the redis timer: the broker, or DELAYTASKS_BENCH_REDIS_URL with another
    broker.
    """
    is_broker = broker_url().startswith(("redis://", "rediss://"))
    return broker_url() if is_broker else os.environ.get("BENCH_REDIS_URL", _BROKER)


def use(broker: str | None) -> None:
    """Use another broker in this run and in the processes that it starts."""
    if broker is not None:
        os.environ["BENCH_BROKER_URL"] = broker


def data_dir() -> str:
    """Return the folder in which the console finds its users."""
    return os.environ.get("BENCH_DATA_DIR", ".delaytasks")


def metrics_port() -> int | None:
    """Return the port at which the worker of this process serves its metrics, or None."""
    port = os.environ.get("BENCH_METRICS_PORT")
    return None if port is None else int(port)


def notes_path() -> str | None:
    """Return the file for the notes of tasks; None in a process that runs no task."""
    return os.environ.get("BENCH_NOTES")


@cache
def takes_s() -> float:
    """Return the duration of each task; most cases need none."""
    return float(os.environ.get("BENCH_TAKES_S", "0"))


def computes() -> bool:
    """Return whether a task with a duration computes instead of sleeping."""
    return "BENCH_COMPUTES" in os.environ


def is_one_at_a_time() -> bool:
    """Return whether a process with an event loop runs one task at a time."""
    return "BENCH_ONE_AT_A_TIME" in os.environ
