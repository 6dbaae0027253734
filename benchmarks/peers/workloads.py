"""The same work for every system. Each workload is called once a round for each system, and adds to the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import percentile
from benchmarks.peers.results import Results
from benchmarks.peers.side import Made, Peer
from benchmarks.waiting import sleep_until, wall

HOUR_S, DAY_S = 3600.0, 86400.0
#: Steady tasks are due in one to five seconds.
SOONEST_S, LATEST_S = 1.0, 5.0


@dataclass
class Stage:
    results: Results
    is_quick: bool
    backlog: int
    say: Callable[[str], None]

    def size(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full

    def fewer(self, workload: str, peer: Peer, made: Made, wanted: int) -> None:
        if made.tasks < wanted:
            text = f"{made.tasks:,} tasks of {wanted:,}, the time was over"
            self.results.remark(workload, peer.system.name, text)


def call(stage: Stage, peer: Peer) -> None:
    """One producer, one call after the other, due in an hour; nobody works."""
    count = stage.size(3000, 300)
    stage.results.sizes["call"] = f"{count:,} tasks due in an hour, by one producer"
    with peer.producing():
        due = wall() + HOUR_S
        peer.schedule(count // 10, due, due, 5)
        made = peer.schedule(count, due, due, stage.size(20, 5))
    stage.fewer("call", peer, made, count)
    stage.results.add("call", peer.system.name, made.per_s)
    stage.say(f"call: {peer.system.title}: {made.per_s:,.0f}/s")


def bulk(stage: Stage, peer: Peer) -> None:
    count = stage.size(100_000, 5000)
    stage.results.sizes["bulk"] = f"{count:,} tasks due in an hour, by one producer"
    if not peer.system.has_bulk:
        stage.results.remark("bulk", peer.system.name, "no call for many tasks")
        return
    with peer.producing():
        due = wall() + HOUR_S
        peer.schedule_many(count // 20, due, due, 5)
        made = peer.schedule_many(count, due, due, stage.size(30, 10))
    stage.fewer("bulk", peer, made, count)
    stage.results.add("bulk", peer.system.name, made.per_s)
    stage.say(f"bulk: {peer.system.title}: {made.per_s:,.0f}/s")


def burst(stage: Stage, peer: Peer) -> None:
    """All due at one instant, in bulk where that is possible."""
    count, lead, deadline = stage.size(20_000, 2000), stage.size(45, 8), stage.size(60, 20)
    stage.results.sizes["burst"] = (
        f"{count:,} tasks due at one instant, scheduled up to {lead} s before, in bulk where possible"
    )
    with peer.serving():
        due = wall() + lead
        made = peer.schedule_many(count, due, due, lead - 2)
        stage.fewer("burst", peer, made, count)
        if wall() > due:
            stage.results.remark("burst", peer.system.name, "the last ones were scheduled after they were due")
        sleep_until(due)
        is_done = peer.wait_for(made.tasks, deadline)
        ran = peer.ran()
        ended = peer.ended_at() if is_done else max(note.at for note in ran) if ran else wall()
    name, took = peer.system.name, ended - due
    if not is_done:
        stage.results.remark("burst", name, f"{len(ran):,} of {made.tasks:,} ran within {deadline} s")
    if took > 0:
        stage.results.add("burst", name, len(ran) / took)
    else:
        stage.results.remark("burst", name, "all ran before they were due")
    if ran:
        stage.results.add("burst_p99", name, percentile([(note.at - note.due) * 1000 for note in ran], 0.99))
    stage.say(f"burst: {peer.system.title}: {len(ran):,} in {took:.2f} s, {len(ran) / max(took, 1e-9):,.0f}/s")


WORKLOADS: dict[str, Callable[[Stage, Peer], None]] = {
    "call": call,
    "bulk": bulk,
    "burst": burst,
}
