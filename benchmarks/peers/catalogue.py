"""The measured systems and their configuration.

Each is configured as its own documentation recommends for throughput. A worker has two processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.peers.servers import POSTGRESQL, RABBITMQ, REDIS

PROGRAMS = "benchmarks.peers.programs"
_CELERY = [
    "celery",
    "-A",
    "{app}",
    "worker",
    "-P",
    "prefork",
    "-c",
    "2",
    "-n",
    "{name}@%h",
    "--loglevel",
    "WARNING",
]
_BEAT = ["celery", "-A", "{app}", "beat", "-s", "{folder}/beat-{name}", "--loglevel", "WARNING"]


@dataclass(frozen=True)
class System:
    name: str
    title: str
    #: The servers that store and transport tasks.
    servers: tuple[str, ...]
    #: The commands of one worker; `{name}` is its name.
    worker: tuple[tuple[str, ...], ...]
    producer: tuple[str, ...]
    #: The configuration and its source.
    setup: str
    source: str = ""
    package: str = ""
    #: The runtime: the project's own Python, the peers' Python, or Node.
    runs_on: Literal["own", "python", "node"] = "python"
    #: Commands that are started once, whatever the number of workers.
    extra_commands: tuple[tuple[str, ...], ...] = ()
    #: The broker of Celery.
    broker: str = REDIS
    has_bulk: bool = True
    #: The maximum number of tasks due together; with more, the system runs no task at all.
    most_due_together: int | None = None
    #: Tasks run only in the process that schedules them.
    is_one_process: bool = False
    #: Limitations according to the system's documentation or code.
    limits: tuple[str, ...] = field(default=())


def _ours(
    name: str, title: str, servers: tuple[str, ...], app: str, setup: str, broker: str = REDIS
) -> System:
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
        extra_commands=(
            tuple(part.format(app=app, name="{name}", folder="{folder}") for part in _BEAT),
        ),
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


def _python(
    name: str, title: str, servers: tuple[str, ...], *worker: tuple[str, ...], **facts: Any
) -> System:
    producer = (f"{PROGRAMS}.{name}", "produce")
    return System(
        name, title, servers, worker, producer, package=facts.pop("package", name), **facts
    )


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
        (("delaytasks", "-A", "benchmarks.ours:direct_app", "run", "--forever", "-c", "2"),),
        (f"{PROGRAMS}.ours", "produce", "delaytasks_direct"),
        "no broker: `delaytasks run --forever` with 2 processes",
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
        setup="asyncpg on a direct connection, uvloop, `batch_size=200` since jobs are short, its "
        "autovacuum settings, "
        "2 processes; bulk: lists to `enqueue`",
        source="https://github.com/janbjorge/pgqueuer/blob/main/docs/guides/performance-tuning.md",
        limits=("accepts relative delays only",),
    ),
    _python(
        "procrastinate",
        "Procrastinate",
        (POSTGRESQL,),
        *[
            (
                "procrastinate",
                "--app",
                f"{PROGRAMS}.procrastinate.app",
                "worker",
                "--concurrency",
                "30",
                "--fetch-job-polling-interval",
                "0.1",
            )
        ]
        * 2,
        setup="2 processes with `--concurrency 30`; it polls for delayed tasks every 0.1 s "
        "instead of 5 s; "
        "bulk: `batch_defer_async`",
        source="https://procrastinate.readthedocs.io/en/stable/howto/production/concurrency.html",
    ),
    _python(
        "awa",
        "awa-pg",
        (POSTGRESQL,),
        *[(f"{PROGRAMS}.awa", "work")] * 2,
        package="awa-pg",
        setup="2 processes with a concurrency of 100 each; it polls for due tasks every 100 ms "
        "instead of 200 and 250 ms; bulk: `enqueue_many_copy`",
        source="https://github.com/hardbyte/awa/blob/main/docs/configuration.md",
        most_due_together=3640,
        limits=(
            "all tasks of a bulk call are due at the same instant",
            "it starts no task if more than 3,640 are due together, because it moves 4,096 with "
            "one "
            "statement that has 18 parameters per task, and PostgreSQL accepts 65,535",
        ),
    ),
    System(
        "bullmq",
        "BullMQ (Node)",
        (REDIS,),
        (("work",), ("work",)),
        ("produce",),
        "2 processes with `concurrency: 100`, finished jobs removed; bulk: `addBulk`",
        "https://docs.bullmq.io/guide/parallelism-and-concurrency",
        package="bullmq",
        runs_on="node",
        limits=("due times in whole milliseconds",),
    ),
    _python(
        "dramatiq",
        "Dramatiq",
        (REDIS,),
        ("dramatiq", f"{PROGRAMS}.dramatiq", "--processes", "2", "--threads", "8"),
        setup="one process per core with 8 threads, the default of its command",
        source="https://dramatiq.io/guide.html",
        has_bulk=False,
        limits=("due times in whole milliseconds",),
    ),
    _python(
        "huey",
        "huey",
        (REDIS,),
        ("huey.bin.huey_consumer", f"{PROGRAMS}.huey.huey", "-k", "process", "-w", "2"),
        setup="`-k process -w 2`, no results; its scheduler polls every second, the shortest "
        "interval that it allows",
        source="https://huey.readthedocs.io/en/latest/consumer.html",
        has_bulk=False,
        limits=("polls for due tasks once a second",),
    ),
    _python(
        "rq",
        "RQ",
        (REDIS,),
        (
            "rq.cli",
            "worker-pool",
            "--num-workers",
            "2",
            "--url",
            "{redis}",
            "--worker-class",
            "rq.worker.SimpleWorker",
        ),
        setup="a pool of 2 `SimpleWorker`s (no fork for each job), as it advises for very short "
        "jobs; results dropped; "
        "bulk: `enqueue_at` in a pipeline",
        source="https://github.com/rq/rq/blob/master/docs/benchmark.md",
        limits=("due times in whole seconds", "polls for due tasks once a second"),
    ),
    _python(
        "arq",
        "arq",
        (REDIS,),
        *[("arq", f"{PROGRAMS}.arq.WorkerSettings")] * 2,
        setup="2 processes with `max_jobs = 100`, results dropped; it polls every 0.1 s instead "
        "of 0.5 s; "
        "many tasks: 20 concurrent calls",
        source="https://arq-docs.helpmanual.io/",
        has_bulk=False,
    ),
    _python(
        "saq",
        "SAQ",
        (REDIS,),
        ("saq", f"{PROGRAMS}.saq.settings", "--workers", "2"),
        setup="`--workers 2` with a concurrency of 10, as in its own benchmark; many tasks: 20 "
        "concurrent calls",
        source="https://github.com/tobymao/saq/blob/master/benchmarks/simple.py",
        has_bulk=False,
        limits=("polls for due tasks once a second",),
    ),
    _python(
        "apscheduler",
        "APScheduler",
        (POSTGRESQL,),
        setup="one process with 20 threads and its SQLAlchemy store; late jobs run nevertheless",
        source="https://apscheduler.readthedocs.io/en/3.x/faq.html",
        has_bulk=False,
        is_one_process=True,
        limits=("one process, because a store cannot be shared",),
    ),
]
SYSTEMS = {system.name: system for system in _ALL}
#: Measured in every run.
ALWAYS = ("delaytasks",)
