"""The systems that are measured: what they are, and how they are set up, each as its own documentation asks for where
throughput matters. A worker has two processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from benchmarks.peers.servers import POSTGRESQL, RABBITMQ, REDIS

PROGRAMS = "benchmarks.peers.programs"
_CELERY = ["celery", "-A", "{app}", "worker", "-P", "prefork", "-c", "2", "-n", "{name}@%h", "--loglevel", "WARNING"]
_BEAT = ["celery", "-A", "{app}", "beat", "-s", "{folder}/beat-{name}", "--loglevel", "WARNING"]


@dataclass(frozen=True)
class System:
    name: str
    title: str
    #: Where tasks wait and through which they come.
    servers: tuple[str, ...]
    #: What is started as one worker; `{name}` is its name.
    worker: tuple[tuple[str, ...], ...]
    producer: tuple[str, ...]
    #: How it was set up, and where that is from.
    setup: str
    source: str = ""
    package: str = ""
    #: Which Python or Node: the project's own, or the peers'.
    runs_on: Literal["own", "python", "node"] = "python"
    #: Once, whatever the number of workers.
    beside: tuple[tuple[str, ...], ...] = ()
    #: Of Celery.
    broker: str = REDIS
    has_bulk: bool = True
    #: Tasks run in the process that schedules them, and in no other.
    is_one_process: bool = False
    #: What it can not do, as its documentation or its code says.
    limits: tuple[str, ...] = field(default=())


def _ours(name: str, title: str, servers: tuple[str, ...], app: str, setup: str, broker: str = REDIS) -> System:
    side = name.removesuffix("_rabbitmq")
    app = f"benchmarks.ours:{app}"
    return System(
        name,
        title,
        servers,
        (tuple(part.format(app=app, name="{name}") for part in _CELERY),),
        (f"{PROGRAMS}.ours", "produce", side),
        setup,
        package="delaytasks",
        runs_on="own",
        broker=broker,
        beside=(tuple(part.format(app=app, name="{name}", folder="{folder}") for part in _BEAT),),
    )


def _celery(name: str, broker: str) -> System:
    return System(
        name,
        f"Celery eta, {broker}",
        (broker,),
        (tuple(part.format(app="benchmarks.bare:app", name="{name}") for part in _CELERY),),
        (f"{PROGRAMS}.ours", "produce", "celery"),
        "`apply_async(eta=…)`, prefork with 2 processes, results ignored",
        package="celery",
        runs_on="own",
        broker=broker,
        has_bulk=False,
    )


def _python(name: str, title: str, servers: tuple[str, ...], *worker: tuple[str, ...], **facts: object) -> System:
    producer = (f"{PROGRAMS}.{name}", "produce")
    return System(name, title, servers, worker, producer, package=facts.pop("package", name), **facts)  # type: ignore[arg-type]


_ALL = [
    _ours(
        "delaytasks",
        "delaytasks, `eta`",
        (POSTGRESQL, REDIS),
        "app",
        "the defaults: timer `eta`, prefork with 2 processes, beat",
    ),
    _ours(
        "delaytasks_redis",
        "delaytasks, `redis`",
        (POSTGRESQL, REDIS),
        "redis_app",
        "timer `redis`, prefork with 2 processes, beat",
    ),
    System(
        "delaytasks_direct",
        "delaytasks, `direct`",
        (POSTGRESQL,),
        (("delaytasks", "-A", "benchmarks.ours:direct_app", "drain", "--forever", "-c", "2"),),
        (f"{PROGRAMS}.ours", "produce", "delaytasks_direct"),
        "no broker: `delaytasks drain --forever` with 2 processes",
        package="delaytasks",
        runs_on="own",
    ),
    _ours(
        "delaytasks_rabbitmq",
        "delaytasks, `eta`, RabbitMQ",
        (POSTGRESQL, RABBITMQ),
        "app",
        "the defaults on RabbitMQ: timer `eta`, prefork with 2 processes, beat",
        RABBITMQ,
    ),
    _celery("celery", REDIS),
    _celery("celery_rabbitmq", RABBITMQ),
    _python(
        "pgqueuer",
        "PgQueuer",
        (POSTGRESQL,),
        *[(f"{PROGRAMS}.pgqueuer", "work")] * 2,
        setup="asyncpg on a direct connection, uvloop, `batch_size=200` since jobs are short, its autovacuum settings, "
        "2 processes; bulk: lists to `enqueue`",
        source="https://github.com/janbjorge/pgqueuer/blob/main/docs/guides/performance-tuning.md",
        limits=("relative delays only",),
    ),
]
SYSTEMS = {system.name: system for system in _ALL}
#: Measured whenever something is.
ALWAYS = ("delaytasks",)
