"""The same workloads for every system.

Each is called once per round and system, and adds to the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import percentile
from benchmarks.peers.results import Results
from benchmarks.peers.side import Peer, Scheduled
from benchmarks.waiting import sleep_until, wall

HOUR_S, DAY_S = 3600.0, 86400.0
#: Steady tasks are due in one to five seconds.
SOONEST_S, LATEST_S = 1.0, 5.0
#: The tasks of a worker that is killed: four processes, and one task for each at every step.
SIMULTANEOUS, STEP_S, TAKES_S = 4, 0.5, 0.3
#: Seconds from the begin of scheduling to the first due time.
AHEAD_S = 5.0


@dataclass
class WorkloadContext:
    results: Results
    is_quick: bool
    backlog: int
    say: Callable[[str], None]

    def size(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full

    def fewer(self, workload: str, peer: Peer, made: Scheduled, wanted: int) -> None:
        if made.tasks < wanted:
            text = f"{made.tasks:,} of {wanted:,} tasks were scheduled before the time limit"
            self.results.remark(workload, peer.system.name, text)


def call(stage: WorkloadContext, peer: Peer) -> None:
    """Schedule one call after the other, without workers."""
    _schedule(stage, peer, "call", peer.schedule, stage.size(3000, 300), 10, stage.size(20, 5))


def bulk(stage: WorkloadContext, peer: Peer) -> None:
    count = stage.size(100_000, 5000)
    if peer.system.has_bulk:
        _schedule(stage, peer, "bulk", peer.schedule_many, count, 20, stage.size(30, 10))
    else:
        stage.results.remark("bulk", peer.system.name, "it has no call that schedules many tasks")


Schedule = Callable[[int, float, float, float], Scheduled]


def _schedule(
    stage: WorkloadContext,
    peer: Peer,
    workload: str,
    schedule: Schedule,
    count: int,
    share: int,
    limit_s: float,
) -> None:
    """Schedule `count` tasks, and before that a share of them to warm up connections and caches."""
    stage.results.sizes[workload] = f"{count:,} tasks due in an hour, by one producer"
    with peer.producing():
        due = wall() + HOUR_S
        schedule(count // share, due, due, 5)
        made = schedule(count, due, due, limit_s)
    stage.fewer(workload, peer, made, count)
    stage.results.add(workload, peer.system.name, made.per_s)
    stage.say(f"{workload}: {peer.system.title}: {made.per_s:,.0f}/s")


def burst(stage: WorkloadContext, peer: Peer) -> None:
    """Schedule tasks due at one instant, in bulk if possible."""
    count, lead, deadline = stage.size(50_000, 2000), stage.size(60, 8), stage.size(60, 20)
    stage.results.sizes["burst"] = (
        f"{count:,} tasks due at one instant, scheduled up to {lead} s before, in bulk where "
        "possible"
    )
    most = peer.system.most_due_together
    if most is not None and count > most:
        text = f"measured with {most:,} tasks: it runs no task if more are due together"
        stage.results.remark("burst", peer.system.name, text)
        count = most
    with peer.serving():
        due = wall() + lead
        made = peer.schedule_many(count, due, due, lead - 2)
        stage.fewer("burst", peer, made, count)
        if wall() > due:
            text = "the last tasks were scheduled after their due time"
            stage.results.remark("burst", peer.system.name, text)
        sleep_until(due)
        is_done = peer.wait_for(made.tasks, deadline)
        ran = peer.ran()
        ended = peer.ended_at() if is_done else max(note.ended for note in ran) if ran else wall()
    name, took = peer.system.name, ended - due
    if not is_done:
        stage.results.remark(
            "burst", name, f"{len(ran):,} of {made.tasks:,} ran within {deadline} s"
        )
    if took > 0:
        stage.results.add("burst", name, len(ran) / took)
    else:
        stage.results.remark("burst", name, "all tasks ran before they were due")
    if ran:
        stage.results.add(
            "burst_p99", name, percentile([(note.began - note.due) * 1000 for note in ran], 0.99)
        )
    stage.say(
        f"burst: {peer.system.title}: {len(ran):,} in {took:.2f} s, "
        f"{len(ran) / max(took, 1e-9):,.0f}/s"
    )


def steady(rate: int, batch: int) -> Callable[[WorkloadContext, Peer], None]:
    """Return a workload of `rate` tasks per second, due in one to five seconds, in batches."""

    def work(stage: WorkloadContext, peer: Peer) -> None:
        workload, name = f"steady_{rate}", peer.system.name
        seconds = stage.size(20, 6)
        batches = f"in batches of {batch}" if batch > 1 else "one call each"
        stage.results.sizes[workload] = (
            f"{rate:,} tasks a second for {seconds} s, due in 1 to 5 s, {batches}"
        )
        with peer.serving():
            worker_s, server_s = peer.worker_cpu_s(), peer.server_cpu_s()
            made, late = _steady(stage, workload, peer, rate, batch, seconds)
            for what, before, after in (
                ("worker", worker_s, peer.worker_cpu_s()),
                ("servers", server_s, peer.server_cpu_s()),
            ):
                if before is not None and after is not None and late:
                    stage.results.add(
                        f"{workload}_{what}", name, (after - before) / len(late) * 1000
                    )
        if peer.system.is_one_process:
            stage.results.remark(workload, name, "the CPU of its worker includes scheduling")
        if late:
            stage.results.add(f"{workload}_p50", name, percentile(late, 0.5))
            stage.results.add(f"{workload}_p99", name, percentile(late, 0.99))
            stage.results.add(
                f"{workload}_early", name, 100 * sum(one < 0 for one in late) / len(late)
            )
        stage.say(f"{workload}: {peer.system.title}: {made.per_s:,.0f}/s, {_said(late)}")

    return work


def _steady(
    stage: WorkloadContext, workload: str, peer: Peer, rate: int, batch: int, seconds: int
) -> tuple[Scheduled, list[float]]:
    """Run the workload, and return what was scheduled and the lateness of the tasks in
    milliseconds.
    """
    count = rate * seconds
    made = peer.steady(rate, count, batch, SOONEST_S, LATEST_S, 2 * seconds)
    if made.took_s > seconds * 1.1:
        stage.results.remark(
            workload, peer.system.name, f"could schedule only {made.per_s:,.0f} a second"
        )
    deadline = LATEST_S + stage.size(20, 10)
    if not peer.wait_for(made.tasks, deadline):
        text = (
            f"{len(peer.ran()):,} of {made.tasks:,} ran within {deadline:.0f} s after the last "
            "one was scheduled"
        )
        stage.results.remark(workload, peer.system.name, text)
    return made, [(note.began - note.due) * 1000 for note in peer.ran()]


def backlog(stage: WorkloadContext, peer: Peer) -> None:
    """Measure near tasks, add many tasks that are due tomorrow, and measure near tasks again."""
    name, seconds = peer.system.name, stage.size(15, 5)
    stage.results.sizes["backlog"] = (
        f"50 tasks a second for {seconds} s, due in 1 to 5 s, without and behind "
        f"{stage.backlog:,} tasks that are due tomorrow"
    )
    with peer.serving():
        # The part without backlog comes first, since it allocates the memory that any work needs.
        without = _steady(stage, "backlog", peer, 50, 1, seconds)[1]
        peer.forget()
        worker, server = peer.worker_bytes(), peer.server_bytes()
        due = wall() + DAY_S
        far = peer.schedule_many(stage.backlog, due, due, max(stage.backlog / 5000, 30))
        stage.fewer("backlog", peer, far, stage.backlog)
        made, late = _steady(stage, "backlog", peer, 50, 1, seconds)
        for what, before, after in (
            ("worker", worker, peer.worker_bytes()),
            ("server", server, peer.server_bytes()),
        ):
            if before is not None and after is not None:
                stage.results.add(f"backlog_{what}", name, max(after - before, 0) / far.tasks)
    stage.results.add("backlog_ran", name, 100 * len(late) / made.tasks)
    if without:
        stage.results.add("backlog_without", name, percentile(without, 0.99))
    if late:
        stage.results.add("backlog_p99", name, percentile(late, 0.99))
    else:
        stage.results.remark("backlog", name, "no near task ran")
    stage.say(
        f"backlog: {peer.system.title}: {far.tasks:,} far, {len(late):,} of {made.tasks:,} near "
        f"ran, {_said(late)}"
    )


def recovery(stage: WorkloadContext, peer: Peer) -> None:
    """Kill one of two workers while it runs tasks that take time."""
    steps, name = stage.size(20, 8), peer.system.name
    limit = stage.size(75, 12)
    count = steps * SIMULTANEOUS
    stage.results.sizes["recovery"] = (
        f"{count} tasks of {TAKES_S * 1000:.0f} ms, {SIMULTANEOUS} due every {STEP_S:g} s, two "
        "workers; half-way, "
        f"the worker that starts a task is killed; the measurement ends {limit} s after the last "
        "due instant"
    )
    with peer.serving(2, TAKES_S):
        first = wall() + AHEAD_S
        for step in range(steps):
            due = first + step * STEP_S
            # Due times differ by microseconds, so that each task is identifiable.
            peer.schedule(SIMULTANEOUS, due, due + SIMULTANEOUS * 1e-6, AHEAD_S)
        last = first + (steps - 1) * STEP_S
        sleep_until(first + steps // 2 * STEP_S)
        victim = peer.kill_a_worker()
        stage.results.remark("recovery", name, victim if peer.system.is_one_process else "")
        sleep_until(last)
        is_done = _all_ran(peer, count, limit)
        runs: dict[float, float] = {}
        for note in peer.ran():
            runs[note.due] = min(note.began - note.due, runs.get(note.due, DAY_S))
    missing = count - len(runs)
    stage.results.add("recovery_missing", name, float(missing))
    if is_done:
        stage.results.add("recovery_last", name, max(runs.values()))
    else:
        text = f"{missing} of {count} had not run {limit} s after the last one was due"
        stage.results.remark("recovery", name, text)
    stage.say(
        f"recovery: {peer.system.title}: {missing} missing, latest "
        f"{max(runs.values(), default=0):.2f} s"
    )


def _all_ran(peer: Peer, count: int, limit: float) -> bool:
    """Return whether each of the tasks has run; some may have run twice."""
    ends = wall() + limit
    while len({note.due for note in peer.ran()}) < count:
        if wall() > ends:
            return False
        sleep_until(wall() + 0.1)
    return True


def _said(late: list[float]) -> str:
    if not late:
        return "none ran"
    early = sum(one < 0 for one in late)
    return (
        f"p50 {percentile(late, 0.5):.1f} ms, p99 {percentile(late, 0.99):.1f} ms, {early:,} of "
        f"{len(late):,} early"
    )


WORKLOADS: dict[str, Callable[[WorkloadContext, Peer], None]] = {
    "call": call,
    "bulk": bulk,
    "burst": burst,
    "steady_50": steady(50, 1),
    "steady_1000": steady(1000, 20),
    "backlog": backlog,
    "recovery": recovery,
}
