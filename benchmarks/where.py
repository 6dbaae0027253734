"""Where the services are: DELAYTASKS_BENCH_DATABASE_URL and DELAYTASKS_BENCH_BROKER_URL, or the usual local ones."""

from __future__ import annotations

import os
from functools import cache

#: Of each timer: deployments that share a database and a broker.
NAMESPACES = {"eta": "bench", "redis": "bench_redis", "direct": "bench_direct"}
TABLE_PREFIX = "bench_"
#: The queue of the bare Celery app.
BARE_QUEUE = "bench_bare"
#: A Redis database of its own: what lies there besides ours stops the run.
_BROKER = "redis://127.0.0.1:6379/5"
_DATABASE = "postgresql://postgres@127.0.0.1:5432/postgres"

# Handed on under names that are no settings of delaytasks, whose every DELAYTASKS_* variable is one. Those of tests,
# which may import this, are theirs.
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
    """Of the redis timer: the broker, or DELAYTASKS_BENCH_REDIS_URL beside another broker."""
    is_broker = broker_url().startswith(("redis://", "rediss://"))
    return broker_url() if is_broker else os.environ.get("BENCH_REDIS_URL", _BROKER)


def use(broker: str | None) -> None:
    """Another broker for this run and for the processes that it starts."""
    if broker is not None:
        os.environ["BENCH_BROKER_URL"] = broker


def notes_path() -> str | None:
    """The file in which tasks note that they ran; None in a process that runs none."""
    return os.environ.get("BENCH_NOTES")


@cache
def takes_s() -> float:
    """How long each task has to take: only where that matters it is not zero."""
    return float(os.environ.get("BENCH_TAKES_S", "0"))
