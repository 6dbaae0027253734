"""What may go wrong in a run. Each one breaks something, waits, mends it, and says what it was."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from chaos.field import Field, children_of
from chaos.history import Fault, Victim
from chaos.project import now_us
from tests import faketime
from tests.proxy import Proxy
from tests.services import kill_connections

#: Longer than a lease.
FROZEN_S = 6.0
#: Of each byte, either way.
LATENCY_S = 0.2
#: What was held back on the way has arrived by then, and had its effects: the claim of a process that is dead, say.
ECHO_S = 0.5
#: As long as nobody's retries last.
AWAY_S = 2.5
HOUR_S = 3600
COMMIT = rb"COMMIT(?!TED)|INSERT INTO|UPDATE |EXECUTE "


def always(field: Field) -> str:
    return ""


def by_server(field: Field) -> str:
    return "" if field.database else "SQLite has no server"


def by_broker_link(field: Field) -> str:
    return "" if field.broker_link else "the embedded broker has no TCP"


def by_clock(field: Field) -> str:
    if not field.database:
        return "SQLite's clock is the process's"
    return "" if faketime.library() else faketime.MISSING


class Nemesis(NamedTuple):
    kind: str
    #: What it breaks: each of these has one thing wrong with it at a time.
    victim: Victim
    strike: Callable[[Field, random.Random], str]
    #: Why it can not strike on a field, if so.
    misfit: Callable[[Field], str] = always

    def fault(self, field: Field, chance: random.Random) -> Fault:
        from_us = now_us()
        target = self.strike(field, chance)
        return Fault(self.kind, target, from_us, now_us(), self.victim)


# -- processes ------------------------------------------------------------------------------------


def kill_worker(field: Field, chance: random.Random) -> str:
    return _new_worker(field, chance)


def skew_worker(field: Field, chance: random.Random) -> str:
    ahead_s = chance.choice([-HOUR_S, HOUR_S])
    return f"{_new_worker(field, chance, **faketime.environment(ahead_s))}, {ahead_s:+} s"


def _new_worker(field: Field, chance: random.Random, **environment: str) -> str:
    number = chance.randrange(len(field.workers))
    field.workers[number].kill()
    field.workers[number] = field.new_worker(**environment)
    return f"worker {number}"


def kill_child(field: Field, chance: random.Random) -> str:
    worker = chance.choice(field.workers)
    children = children_of(worker.pid)
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
    field.pause(FROZEN_S)
    os.killpg(pid, signal.SIGCONT)
    return f"worker {number}"


def stop_worker_politely(field: Field, chance: random.Random) -> str:
    number = chance.randrange(len(field.workers))
    field.workers[number].terminate(60)
    field.workers[number] = field.new_worker()
    return f"worker {number}"


def kill_beat(field: Field, chance: random.Random) -> str:
    return _new_beat(field, chance)


def skew_beat(field: Field, chance: random.Random) -> str:
    ahead_s = chance.choice([-HOUR_S, HOUR_S])
    return f"{_new_beat(field, chance, **faketime.environment(ahead_s))}, {ahead_s:+} s"


def _new_beat(field: Field, chance: random.Random, **environment: str) -> str:
    number = chance.randrange(len(field.beats))
    field.beats[number].kill()
    field.beats[number] = field.new_beat(**environment)
    return f"beat {number}"


# -- the broker -----------------------------------------------------------------------------------


def empty_broker(field: Field, _chance: random.Random) -> str:
    field.broker.empty(field.queues())
    return field.broker.name


def restart_broker(field: Field, chance: random.Random) -> str:
    is_empty = chance.random() < 0.5
    field.broker.crash()
    field.pause(chance.uniform(0.1, 3))
    field.broker.start(is_empty)
    return f"{field.broker.name}{', which forgets all' if is_empty else ''}"


def close_broker_connections(field: Field, _chance: random.Random) -> str:
    field.broker.close_connections()
    return f"all connections to {field.broker.name}"


def lose_broker(field: Field, chance: random.Random) -> str:
    assert field.broker_link is not None
    return _black_hole(field, field.broker_link, chance)


def slow_broker(field: Field, chance: random.Random) -> str:
    assert field.broker_link is not None
    return _slow(field, [field.broker_link], chance)


# -- the database ---------------------------------------------------------------------------------


def restart_database(field: Field, chance: random.Random) -> str:
    assert field.database is not None
    field.database.crash()
    field.pause(chance.uniform(0.1, 2))
    field.database.start()
    return field.site.database


def end_connections(field: Field, _chance: random.Random) -> str:
    return f"{kill_connections(field.database_url)} connections"


def lose_answers(field: Field, chance: random.Random) -> str:
    """What was committed, nobody hears."""
    return _cut(field, chance, Proxy.cut_answer)


def lose_requests(field: Field, chance: random.Random) -> str:
    """What was to be committed, nobody heard."""
    return _cut(field, chance, Proxy.cut_request)


def lose_database(field: Field, chance: random.Random) -> str:
    return _black_hole(field, chance.choice(field.links), chance)


def slow_database(field: Field, chance: random.Random) -> str:
    return _slow(field, field.links, chance)


# -- links ----------------------------------------------------------------------------------------


def _cut(field: Field, chance: random.Random, cut: Callable[[Proxy, bytes], None]) -> str:
    """Some answers in a row; and then who asks again finds nobody, or is told."""
    number, times, is_away = chance.randrange(len(field.links)), chance.randint(1, 4), chance.random() < 0.5
    link, began, before = field.links[number], time.monotonic(), field.links[number].cut
    for _ in range(times):
        cut_yet = link.cut
        cut(link, COMMIT)
        while link.cut == cut_yet and time.monotonic() < began + AWAY_S and not field.is_over.is_set():
            time.sleep(0.001)
        if is_away:
            link.refuse()
            field.pause(AWAY_S)
            break
    link.heal()
    return (
        f"{link.cut - before} of {('the producers', 'the workers')[number]}{', which find nobody' if is_away else ''}"
    )


def _black_hole(field: Field, link: Proxy, chance: random.Random) -> str:
    seconds, is_reset = chance.uniform(1, 5), chance.random() < 0.5
    link.swallow()
    field.pause(seconds)
    if is_reset:
        link.reset()
    _heal(field, [link])
    return f"for {seconds:.1f} s{', and what was open is reset' if is_reset else ''}"


def _slow(field: Field, links: list[Proxy], chance: random.Random) -> str:
    seconds = chance.uniform(2, 5)
    for link in links:
        link.delay_s = LATENCY_S
    field.pause(seconds)
    _heal(field, links)
    return f"{LATENCY_S * 1000:.0f} ms either way for {seconds:.1f} s"


def _heal(field: Field, links: list[Proxy]) -> None:
    for link in links:
        link.heal()
    field.pause(ECHO_S)


NEMESES = [
    Nemesis("kill -9 of a worker", "worker", kill_worker),
    Nemesis("kill -9 of a pool process", "worker", kill_child),
    Nemesis("SIGSTOP past the lease", "worker", freeze_worker),
    Nemesis("warm shutdown", "worker", stop_worker_politely),
    Nemesis("worker with a wrong clock", "worker", skew_worker, by_clock),
    Nemesis("kill -9 of a beat", "beat", kill_beat),
    Nemesis("beat with a wrong clock", "beat", skew_beat, by_clock),
    Nemesis("broker emptied", "broker", empty_broker),
    Nemesis("broker killed", "broker", restart_broker),
    Nemesis("broker's connections closed", "broker", close_broker_connections),
    Nemesis("broker in a black hole", "broker", lose_broker, by_broker_link),
    Nemesis("broker slow", "broker", slow_broker, by_broker_link),
    Nemesis("database killed", "database", restart_database, by_server),
    Nemesis("database's connections ended", "database", end_connections, by_server),
    Nemesis("COMMIT's answer lost", "database", lose_answers, by_server),
    Nemesis("COMMIT lost", "database", lose_requests, by_server),
    Nemesis("database in a black hole", "database", lose_database, by_server),
    Nemesis("database slow", "database", slow_database, by_server),
]
