"""The faults of a run.

Each nemesis breaks something, waits, repairs it, and returns a record of the fault and the affected
lease owners.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from chaos.history import ALL, KILL, Effect, Fault, now_us
from chaos.pids import children_of
from chaos.system import ChaosSystem
from tests import running as faketime
from tests.proxy import Proxy
from tests.running import Process
from tests.services import kill_connections

#: Longer than a lease.
FROZEN_S = 6.0
#: The latency of each byte, in each direction.
LATENCY_S = 0.2
#: After this time delayed data has arrived and had its effects: for example the claim of a dead
#: process.
ECHO_S = 0.5
#: Longer than any component retries.
AWAY_S = 2.5
HOUR_S = 3600
COMMIT = rb"COMMIT(?!TED)|INSERT INTO|UPDATE |EXECUTE "
#: The proxies in front of the database.
LINKS = ("the producers", "the workers")

Victim = Literal["worker", "beat", "broker", "database"]


class Struck(NamedTuple):
    target: str
    effect: Effect = "none"
    key_owners: tuple[str, ...] = ()
    #: The broker loses messages that it has confirmed.
    loses_messages: bool = False
    #: The database loses claims that were not on the disk yet.
    loses_claims: bool = False


class Nemesis(NamedTuple):
    kind: str
    #: The component that is broken. Each component has at most one fault at a time.
    victim: Victim
    strike: Callable[[ChaosSystem, random.Random], Struck]
    needs: Literal["", "server", "clock"] = ""

    @property
    def is_kill(self) -> bool:
        return KILL in self.kind

    def misfit(self, system: ChaosSystem) -> str:
        """Return why the fault is impossible on a deployment, or an empty string."""
        if self.needs and not system.servers.database:
            return "SQLite has no server, and its clock is that of the process"
        return faketime.MISSING if self.needs == "clock" and not faketime.library() else ""

    def fault(self, system: ChaosSystem, chance: random.Random) -> Fault:
        from_us = now_us()
        struck = self.strike(system, chance)
        # Redis has no acknowledgement of each message, so a broken connection loses what a worker
        # was about to receive, or keeps it until the end of the visibility timeout.
        is_lossy = system.site.broker != "rabbitmq" and self.victim in ("worker", "broker")
        loses_messages = struck.loses_messages or is_lossy
        target, effect, key_owners, _, loses_claims = struck
        times = from_us, now_us()
        return Fault(self.kind, target, *times, effect, key_owners, loses_messages, loses_claims)


# -- processes ------------------------------------------------------------------------------------


def kill_worker(system: ChaosSystem, chance: random.Random, **environment: str) -> Struck:
    number, worker = _choose(system.workers, chance)
    worker.kill()
    system.workers[number] = system.new_worker(**environment)
    return _of(number, worker, "dead")


def kill_beat(system: ChaosSystem, chance: random.Random, **environment: str) -> Struck:
    number, beat = _choose(system.beats, chance)
    beat.kill()
    system.beats[number] = system.deployment.beat(**environment)
    return Struck(f"beat {number}")


def skewed(kill: Callable[..., Struck]) -> Callable[[ChaosSystem, random.Random], Struck]:
    """Replace a process by one with a wrong clock.

    The replaced worker counts as dead. The wrong clock of the new one does not explain any lost
    lease.
    """

    def strike(system: ChaosSystem, chance: random.Random) -> Struck:
        ahead_s = chance.choice([-HOUR_S, HOUR_S])
        struck = kill(system, chance, **faketime.environment(ahead_s))
        return struck._replace(target=f"{struck.target}, {ahead_s:+} s")

    return strike


def kill_child(system: ChaosSystem, chance: random.Random) -> Struck:
    _, worker = _choose(system.workers, chance)
    while not system.is_over.is_set():
        try:
            child = chance.choice(children_of(worker.pid))
            os.kill(child, signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            assert not worker.ended(), f"{worker.name} has ended by itself\n{worker.log()[-5000:]}"
            system.pause(0.1)  # one process has just died, and its successor is not there yet
            continue
        target = f"pool process {child} of {worker.name}"
        return Struck(target, "dead", (f"{worker.name}/{child}-",))
    return Struck("no process")


def freeze_worker(system: ChaosSystem, chance: random.Random) -> Struck:
    number, worker = _choose(system.workers, chance)
    os.killpg(worker.pid, signal.SIGSTOP)
    system.pause(FROZEN_S)
    os.killpg(worker.pid, signal.SIGCONT)
    struck = _of(number, worker, "away")
    # A frozen process that holds SQLite's lock keeps all others from writing.
    return struck if system.servers.database else struck._replace(key_owners=ALL)


def stop_worker_politely(system: ChaosSystem, chance: random.Random) -> Struck:
    number, worker = _choose(system.workers, chance)
    worker.terminate(60)
    system.workers[number] = system.new_worker()
    return _of(number, worker, "ending")


def _choose(some: list[Process], chance: random.Random) -> tuple[int, Process]:
    number = chance.randrange(len(some))
    return number, some[number]


def _of(number: int, worker: Process, effect: Effect) -> Struck:
    return Struck(f"worker {number}, {worker.name}", effect, (f"{worker.name}/",))


# -- the broker, which no lease needs -------------------------------------------------------------


def empty_broker(system: ChaosSystem, _chance: random.Random) -> Struck:
    system.servers.broker.empty(system.queues())
    return Struck(system.site.broker, loses_messages=True)


def restart_broker(system: ChaosSystem, chance: random.Random) -> Struck:
    is_empty, broker = chance.random() < 0.5, system.servers.broker
    broker.crash()
    system.pause(chance.uniform(0.1, 3))
    broker.start(is_empty)
    data = ", without its data" if is_empty else ""
    return Struck(f"{system.site.broker}{data}", loses_messages=is_empty)


def close_broker_connections(system: ChaosSystem, _chance: random.Random) -> Struck:
    system.servers.broker.close_connections()
    return Struck(f"all connections to {system.site.broker}")


def lose_broker(system: ChaosSystem, chance: random.Random) -> Struck:
    return Struck(_black_hole(system, system.broker_link, chance))


def slow_broker(system: ChaosSystem, chance: random.Random) -> Struck:
    return Struck(_slow(system, [system.broker_link], chance))


# -- the database ---------------------------------------------------------------------------------


def restart_database(system: ChaosSystem, chance: random.Random) -> Struck:
    database = system.servers.database
    assert database is not None
    database.crash()
    system.pause(chance.uniform(0.1, 2))
    database.start()
    is_lossy = system.site.database == "postgresql"
    return Struck(system.site.database, "away", ALL, loses_claims=is_lossy)


def end_connections(system: ChaosSystem, _chance: random.Random) -> Struck:
    """Close all connections of the database's clients, which may reconnect immediately."""
    count = kill_connections(system.servers.database_url)
    return Struck(f"{count} connections", "away", ALL)


def lose_answers(system: ChaosSystem, chance: random.Random) -> Struck:
    """Lose replies to COMMIT. A claim whose reply is lost never runs, and its lease ends."""
    return _cut(system, chance, Proxy.cut_answer)


def lose_requests(system: ChaosSystem, chance: random.Random) -> Struck:
    """Lose COMMIT requests."""
    return _cut(system, chance, Proxy.cut_request)


def lose_database(system: ChaosSystem, chance: random.Random) -> Struck:
    number = chance.randrange(len(system.links))
    return _on_link(number, _black_hole(system, system.links[number], chance))


def slow_database(system: ChaosSystem, chance: random.Random) -> Struck:
    return Struck(_slow(system, system.links, chance), "away", ALL)


# -- links ----------------------------------------------------------------------------------------


def _on_link(number: int, text: str) -> Struck:
    """Describe a fault of one proxy. All workers share one proxy, and no producer holds a lease."""
    return Struck(f"{LINKS[number]}, {text}", "away", ALL if LINKS[number] == "the workers" else ())


def _cut(system: ChaosSystem, chance: random.Random, cut: Callable[[Proxy, bytes], None]) -> Struck:
    """Cut some replies or requests in a row. Sometimes the database is unavailable afterwards."""
    number, times = chance.randrange(len(system.links)), chance.randint(1, 4)
    is_away, link, began = chance.random() < 0.5, system.links[number], time.monotonic()
    before = link.cut
    for _ in range(times):
        cut_yet = link.cut
        cut(link, COMMIT)
        while link.cut == cut_yet and time.monotonic() < began + AWAY_S:
            time.sleep(0.001)
        if is_away:
            link.refuse()
            system.pause(AWAY_S)
            break
    link.heal()
    return _on_link(number, f"{link.cut - before} times{', then unavailable' if is_away else ''}")


def _black_hole(system: ChaosSystem, link: Proxy, chance: random.Random) -> str:
    seconds, is_reset = chance.uniform(1, 5), chance.random() < 0.5
    link.swallow()
    system.pause(seconds)
    if is_reset:
        link.reset()
    _heal(system, [link])
    return f"for {seconds:.1f} s{', then open connections are reset' if is_reset else ''}"


def _slow(system: ChaosSystem, links: list[Proxy], chance: random.Random) -> str:
    seconds = chance.uniform(2, 5)
    for link in links:
        link.delay_s = LATENCY_S
    system.pause(seconds)
    _heal(system, links)
    return f"{LATENCY_S * 1000:.0f} ms each way for {seconds:.1f} s"


def _heal(system: ChaosSystem, links: list[Proxy]) -> None:
    for link in links:
        link.heal()
    system.pause(ECHO_S)


NEMESES = [
    Nemesis("kill -9 of a worker", "worker", kill_worker),
    Nemesis("kill -9 of a pool process", "worker", kill_child),
    Nemesis("SIGSTOP longer than a lease", "worker", freeze_worker),
    Nemesis("warm shutdown", "worker", stop_worker_politely),
    Nemesis("worker with a wrong clock", "worker", skewed(kill_worker), "clock"),
    Nemesis("kill -9 of a beat", "beat", kill_beat),
    Nemesis("beat with a wrong clock", "beat", skewed(kill_beat), "clock"),
    Nemesis("broker emptied", "broker", empty_broker),
    Nemesis("broker killed", "broker", restart_broker),
    Nemesis("broker's connections closed", "broker", close_broker_connections),
    Nemesis("broker in a black hole", "broker", lose_broker),
    Nemesis("broker slow", "broker", slow_broker),
    Nemesis("database killed", "database", restart_database, "server"),
    Nemesis("database's connections ended", "database", end_connections, "server"),
    Nemesis("COMMIT's answer lost", "database", lose_answers, "server"),
    Nemesis("COMMIT lost", "database", lose_requests, "server"),
    Nemesis("database in a black hole", "database", lose_database, "server"),
    Nemesis("database slow", "database", slow_database, "server"),
]
