"""What may go wrong in a run. Each one breaks something, waits, mends it, and says from when to when it was broken."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chaos.history import Fault
from chaos.project import now_us

if TYPE_CHECKING:
    from chaos.field import Field

#: Longer than a lease.
FROZEN_S = 6.0


class Nemesis(NamedTuple):
    kind: str
    strike: Callable[[Field, random.Random], str]
    #: On which fields it can strike.
    fits: Callable[[Field], bool] = lambda field: True

    def fault(self, field: Field, chance: random.Random) -> Fault:
        from_us = now_us()
        target = self.strike(field, chance)
        return Fault(self.kind, target, from_us, now_us())


def kill_worker(field: Field, chance: random.Random) -> str:
    number = chance.randrange(len(field.workers))
    field.workers[number].kill()
    field.workers[number] = field.new_worker()
    return f"worker {number}"


def kill_child(field: Field, chance: random.Random) -> str:
    worker = chance.choice(field.workers)
    children = [int(pid) for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()]
    if not children:
        return "nobody"
    child = chance.choice(children)
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    return f"pool process {child}"


def freeze_worker(field: Field, chance: random.Random) -> str:
    number = chance.randrange(len(field.workers))
    pid = field.workers[number].pid
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    os.killpg(pid, signal.SIGCONT)
    return f"worker {number}"


def stop_worker_politely(field: Field, chance: random.Random) -> str:
    number = chance.randrange(len(field.workers))
    field.workers[number].terminate(60)
    field.workers[number] = field.new_worker()
    return f"worker {number}"


def kill_beat(field: Field, chance: random.Random) -> str:
    number = chance.randrange(len(field.beats))
    field.beats[number].kill()
    field.beats[number] = field.deployment.beat()
    return f"beat {number}"


def flush_broker(field: Field, _chance: random.Random) -> str:
    field.redis.client().flushall()
    return "Redis"


def restart_broker(field: Field, chance: random.Random) -> str:
    field.redis.stop()
    time.sleep(chance.uniform(0.1, 3))
    field.redis.start()
    return "Redis"


def restart_database(field: Field, chance: random.Random) -> str:
    assert field.postgres is not None
    field.postgres.stop(signal.SIGQUIT)
    time.sleep(chance.uniform(0.1, 2))
    field.postgres.start()
    return "PostgreSQL"


def terminate_backends(field: Field, _chance: random.Random) -> str:
    assert field.postgres is not None
    field.postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'delaytasks'"
    )
    return "all connections to PostgreSQL"


def has_postgres(field: Field) -> bool:
    return field.postgres is not None


NEMESES = [
    Nemesis("kill -9 of a worker", kill_worker),
    Nemesis("kill -9 of a pool process", kill_child),
    Nemesis("SIGSTOP past the lease", freeze_worker),
    Nemesis("warm shutdown", stop_worker_politely),
    Nemesis("kill -9 of a beat", kill_beat),
    Nemesis("FLUSHALL", flush_broker),
    Nemesis("broker restarted empty", restart_broker),
    Nemesis("database killed", restart_database, has_postgres),
    Nemesis("connections terminated", terminate_backends, has_postgres),
]
