"""The rules of the dispatcher, on a simulated clock: two workers, one of which may be busy.

`MainProcess` has the real dispatcher, wheel and waitlists. The table and the processes of the pools
are models, so that a seed takes 20 ms. A seed decides the rows (their times, due times, priorities,
queues and limits), which worker gets a message, and which processes die. The properties are in
`Play`, and in `SimulatedWorker` for a single dispatcher:

- no process is idle while a row could start for `PROMISED_S`: behind slow rows, and also in the
  waitlist of a limit that was raised while rows run for minutes;
- a process gets no rows that another one could run, and no entry waits for ever;
- entries start by priority and age, and no queue is passed over, nor the rows without an entry.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError

from delaytasks.limits.admission import Capacity
from delaytasks.loops import Loop
from delaytasks.model.clock import Clock
from delaytasks.model.moves import BroughtBy
from delaytasks.run.chunk import ChunkSize, TagCosts, Tally
from delaytasks.worker.pool import ChunkRequest
from tests.conftest import open_store
from tests.world import Entry, MainProcess, MonkeyPatch, Report, WaitlistState, World
from tests.world.clocks import START_US
from tests.world.recording import ManualTime

QUICK_SEEDS, SEEDS = 100, 1000
#: The bound of the docs, and some trips.
PROMISED_S = 2.0 + 0.1
BUDGET_S, GRACE_S, SWEEP_S, DRAIN_MESSAGES, CHUNK_MAX = 0.05, 1.0, 5.0, 2, 200
#: A trip to the database or the broker, and a row that runs longer than a play.
TRIP_S, LONG_S = 0.002, 300.0
#: How late an entry may be that a dispatcher keeps: the grace, and its wait for a backlog.
KEPT_S = GRACE_S + 10.0 + 1.0
#: So many chunks of others may be sent while a row of a source could start for `PROMISED_S`.
CHUNKS_OF_OTHERS = 12


@dataclass(eq=False)
class Row:
    id: int
    queue: str
    tag: str
    priority: int
    due: float
    takes_s: float
    version: int = 0
    #: WAITING, HELD, CLAIMED, STARTED or DONE, and the process that has claimed it.
    status: str = "WAITING"
    process: Process | None = None
    #: When it was due and a worker could know it, and when it began to wait for a process.
    known: float = float("inf")
    since: float = float("inf")

    @property
    def entry(self) -> Entry:
        due_us = START_US + round(self.due * 1e6)
        return Entry(self.id, self.version, due_us, self.queue, self.priority)


class Table:
    """The rows, and the limits of their tags."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.limits: dict[str, int] = {}
        self.running = Counter[str]()
        #: The rows that wait, by queue in the order of a claim, and the waitlists.
        self.waiting: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
        self.held: dict[tuple[str, str], deque[Row]] = defaultdict(deque)

    def wait(self, row: Row, now: float) -> None:
        """Let a row wait: a new one, or one that was claimed."""
        if row.status in ("CLAIMED", "STARTED"):
            self.running[row.tag] -= 1
            row.version += 1
        row.status, row.process, row.since = "WAITING", None, max(now, row.due)
        insort(self.waiting[row.queue], (-row.priority, row.due, row.id))

    def due(self, queue: str, priorities: Sequence[int], now: float) -> Iterator[Row]:
        for _, due, id in self.waiting[queue]:
            if due <= now and self.rows[id].priority in priorities:
                yield self.rows[id]

    def free(self, tag: str) -> int:
        return self.limits[tag] - self.running[tag] if tag in self.limits else len(self.rows)

    def claim(self, process: Process, rows: Sequence[Row]) -> list[Row]:
        """Claim the rows that may start, and hold the others."""
        of_tag, taken = Counter(row.tag for row in rows), Counter[str]()
        share = {tag: Capacity(max(self.free(tag), 0)).share(of_tag[tag]) for tag in of_tag}
        for row in rows:
            self.waiting[row.queue].remove((-row.priority, row.due, row.id))
            waitlist = self.held[row.queue, row.tag]
            if row.tag in self.limits and (waitlist or taken[row.tag] >= share[row.tag]):
                row.status = "HELD"
                row.version += 1
                waitlist.append(row)
            else:
                taken[row.tag] += 1
                self._give(row, process)
        return [row for row in rows if row.status == "CLAIMED"]

    def admit(
        self, process: Process, queue: str, tag: str, most: int, slots: int = 0
    ) -> tuple[list[Row], WaitlistState | None]:
        """Take rows of a waitlist: for `slots`, or for what is free."""
        waitlist, free = self.held[queue, tag], max(self.free(tag), 0)
        share = slots or Capacity(free).share(most)
        admitted = [waitlist.popleft() for _ in range(min(share, len(waitlist)))]
        for row in admitted:
            self._give(row, process)
        if not admitted:
            return [], WaitlistState(queue, tag, 0) if waitlist else None
        return admitted, WaitlistState(queue, tag, free - share if len(admitted) == share else 0)

    def _give(self, row: Row, process: Process) -> None:
        row.status, row.process = "CLAIMED", process
        row.version += 1
        self.running[row.tag] += 1


class Process:
    """A process of a pool, which runs a chunk as `Runner` does."""

    def __init__(self, play: Play, worker: SimulatedWorker, pid: int) -> None:
        self.play, self.worker, self.pid = play, worker, pid
        self.costs, self.sizes = TagCosts(BUDGET_S), dict[str, ChunkSize]()
        self.request: Any = None
        self.idle_since: float = play.now
        self.is_dead = False

    def begin(self, request: ChunkRequest, done: Any, lost: Any) -> None:
        self.request = request, done, lost
        self.play.go_on(self, self._run(request, done))

    def _run(self, request: ChunkRequest, done: Any) -> Generator[float, None, None]:
        tally = Tally(BroughtBy.ENTRY)
        yield TRIP_S
        began = self.play.now
        others = yield from self._work(request, tally)
        ran, seconds = max(tally.ran, 0), self.play.now - began
        sample = (tally.ran + tally.returned, seconds + tally.correction_s)
        report = Report(tally.claimed, ran, seconds, pid=self.pid, sample=sample, **others)
        self.request, self.idle_since = None, self.play.now
        self.play.after(TRIP_S, lambda: done(report))
        self.worker.feed()

    def _work(self, request: ChunkRequest, tally: Tally) -> Generator[float, None, dict[str, Any]]:
        table, queue = self.play.table, request.drained_queue
        if request.waitlist is not None:
            waitlists = {request.waitlist}
            return (yield from self._serve(waitlists, request.limit, request.serve_s, tally))
        if queue is None:
            rows = [row for one in request.entries if (row := self.play.claimable(one))]
            claimed = table.claim(self, rows)
            seen = {(row.queue, row.tag) for row in rows if row.tag in table.limits}
            yield from self._chunk(claimed, tally)
            return (yield from self._serve(seen, len(rows), request.serve_s, tally))
        size, until = (
            ChunkSize(BUDGET_S, CHUNK_MAX, request.limit),
            self.play.now + request.continue_s,
        )
        drained = dict[int, int]()
        while True:
            most, ran, seconds = size.rows, tally.ran, tally.seconds
            rows = list(table.due(queue, request.priorities, self.play.now))[:most]
            claimed = table.claim(self, rows)
            drained.update((row.id, row.version) for row in claimed)
            yield from self._chunk(claimed, tally)
            size.learn(tally.ran - ran, tally.seconds - seconds)
            seen = {(row.queue, row.tag) for row in rows if row.tag in table.limits}
            is_full = len(rows) == most
            if not claimed or not is_full or seen or self.play.now >= until:
                break
            if self.worker.main.others_wait:
                break
        if not is_full:
            seen |= {name for name, waitlist in table.held.items() if waitlist and name[0] == queue}
        served = yield from self._serve(seen, request.limit, request.serve_s, tally)
        return {"is_full": is_full, "drained": drained, **served}

    def _chunk(self, rows: Sequence[Row], tally: Tally) -> Generator[float, None, None]:
        play, costs, returned, ended = self.play, self.costs, list[Row](), list[Row]()
        waiting: deque[Any] = deque(costs.quick_first(rows))  # type: ignore[arg-type]
        tally.claimed += len(waiting)

        def settle() -> None:
            for row in () if self.is_dead else ended:
                row.status = "DONE"
                play.table.running[row.tag] -= 1
            ended.clear()

        def give_back() -> None:
            settle()
            if waiting and not self.is_dead:
                returned.extend(waiting)
                waiting.clear()
                for row in returned:
                    play.table.wait(row, play.now)
                play.arm([row.entry for row in returned])

        if len(rows) > 1:
            play.after(BUDGET_S, give_back)
        while waiting:
            row = waiting.popleft()
            play.start(row)
            yield row.takes_s
            ended.append(row)
            tally.add(1, row.takes_s)
            tally.correction_s -= costs.learn(row.tag, 1, row.takes_s)
        costs.count_returned(returned, tally)  # type: ignore[arg-type]
        yield TRIP_S
        settle()

    def _serve(
        self, waitlists: set[tuple[str, str]], limit: int, for_s: float, tally: Tally
    ) -> Generator[float, None, dict[str, Any]]:
        """Run tasks of waitlists, whose states are reported."""
        states, play, began = list[WaitlistState](), self.play, self.play.now
        for number, (queue, tag) in enumerate(sorted(waitlists)):
            if number and play.now >= began + for_s:
                states.append(WaitlistState(queue, tag, None))
                continue
            until = play.now + for_s * play.chance.uniform(0.5, 1)
            size = self.sizes.setdefault(tag, ChunkSize(BUDGET_S, CHUNK_MAX, 1))
            while True:
                most = max(min(size.rows, limit), 1)
                rows, state = play.table.admit(self, queue, tag, most)
                if not rows:
                    break
                while rows:
                    of_chunk = Tally(BroughtBy.ENTRY)
                    yield from self._chunk(rows, of_chunk)
                    tally.claimed += of_chunk.claimed
                    tally.add(of_chunk.ran, of_chunk.seconds)
                    size.learn(of_chunk.ran, of_chunk.seconds)
                    is_over, rows = play.now >= until, []
                    if not is_over:
                        rows, _ = play.table.admit(self, queue, tag, most, slots=of_chunk.ran)
                if is_over:
                    state = state and state._replace(open=state.open or 1)
                    break
            if state is not None:
                states.append(state)
        return {"waitlists": tuple(states)}


class SimulatedWorker:
    """A worker: the real main process, and the processes of its pool."""

    def __init__(self, play: Play, number: int, processes: int) -> None:
        self.play, self.number = play, number
        self.main = MainProcess(play.world, processes, name=f"w{number}@test")
        runtime = self.main.runtime
        runtime.call_soon = lambda call: play.after(0, call)
        self.main.pool.apply_async = self._send  # type: ignore[method-assign]
        for driven in (runtime.wheel.loop, runtime.dispatcher.loop):
            self._drive(driven)
        self._queue: deque[tuple[ChunkRequest, Any, Any]] = deque()
        #: The chunks without a report, and the entries that the dispatcher got, in this order.
        self._busy, self._late = 0, 0
        self.got = dict[int, tuple[int, Entry]]()
        self.processes = [Process(play, self, play.new_id()) for _ in range(processes)]
        self._known_limits = dict(play.table.limits)
        #: The processes that died, and the levels of their rows to drain a second time.
        self._dead, self._levels = list[Process](), set[tuple[str, int]]()
        for loop in (self._policies, self._leases, self._watch):
            play.every(1.0, loop)

    def _drive(self, loop: Loop) -> None:
        """Let a loop take a turn when it is woken, and when it wants the next one."""
        turns = 0

        def wake() -> None:
            nonlocal turns
            turns += 1
            self.play.after(0, partial(take_turn, turns))

        def take_turn(turn: int) -> None:
            if turn == turns:
                rest_s = loop._turn()
                if rest_s is not None and turn == turns:
                    self.play.after(max(rest_s, 1e-6), partial(take_turn, turn))

        loop.wake = wake  # type: ignore[method-assign]

    def _send(self, function: Any, args: Any, callback: Any, error_callback: Any) -> object:
        def ended(answer: Callable[[Any], None], info: Any) -> None:
            self._busy -= 1
            answer(info)

        [request] = args
        self._busy += 1
        self._queue.append((request, partial(ended, callback), partial(ended, error_callback)))
        self.play.sent(request)
        if request.entries:
            self._check_order(request.entries)
        if len(request.entries) > 1:
            self.play.after(0, self._check_share)
        self.feed()
        return object()

    def receive(self, entries: Sequence[Entry]) -> None:
        self.got.update((entry.id, (self.play.new_id(), entry)) for entry in entries)
        self.main.dispatcher.receive(entries)

    def _check_order(self, sent: Sequence[Entry]) -> None:
        late = self.play.world.count("entry.late")
        if late != self._late:  # some of them are left to the table
            self._late, self.got = late, {}
        numbered = [self.got.pop(entry.id, (0, entry)) for entry in sent]
        last_number, last = min(numbered, key=lambda got: (got[1].priority, -got[1].due_us))
        for number, entry in self.got.values():
            is_higher = entry.priority > last.priority
            is_older = entry.due_us < last.due_us and number < last_number
            is_same = entry.queue == last.queue and entry.priority == last.priority
            is_due = entry.due_us < self.main.clock.now_us() - 50_000
            if is_due and (is_higher or (is_same and is_older)) and self.play.claimable(entry):
                self.play.find("a later entry is sent first", (entry, last))

    def _check_share(self) -> None:
        if self._busy < len(self.processes):
            self.play.find("a process has rows that another one could run", self._busy)

    def feed(self) -> None:
        for process in self.processes:
            if self._queue and process.request is None and not process.is_dead:
                process.begin(*self._queue.popleft())

    def kill_one(self) -> None:
        """Let a process die, and replace it a moment later."""
        place = self.play.chance.randrange(len(self.processes))
        process = self.processes[place]
        if process.is_dead:
            return
        process.is_dead = True
        self._dead.append(process)

        def replace() -> None:
            self.processes[place] = Process(self.play, self, self.play.new_id())
            if process.request is not None:
                try:
                    raise WorkerLostError("exited prematurely")
                except WorkerLostError:
                    process.request[2](ExceptionInfo())
            self.feed()

        self.play.after(0.3, replace)

    # -- the loops that bring the dispatcher news, once a second -----------------------------------

    def _policies(self) -> None:
        limits = dict(self.play.table.limits)
        if limits != self._known_limits:
            self._known_limits = limits
            self.main.dispatcher.limits_changed(set(limits))

    def _leases(self) -> None:
        levels, self._levels = self._levels, set()
        dead, self._dead = self._dead, []
        for process in dead:
            self.main.dispatcher.process_died(process.pid)
            for row in self.play.table.rows.values():
                if row.process is process and row.status != "DONE":
                    self.play.table.wait(row, self.play.now)
                    row.known = self.play.now
                    self._levels.add((row.queue, row.priority))
        for queue, priority in levels | self._levels:
            self.main.drain(queue, priority)

    def _watch(self) -> None:
        self.main.ask_for_help()


class Play:
    """One seed: a clock, what is to come, a table, and two workers."""

    def __init__(self, world: World, time: ManualTime, seed: int, processes: Sequence[int]) -> None:
        self.world, self.seed, self._time = world, seed, time
        self.chance = random.Random(seed)
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = iter(range(1, 1 << 60))
        self.new_id = lambda: next(self._numbers)
        self.table = Table()
        self.findings: list[str] = []
        #: Whether fewer slow rows run than there are processes, so that each row starts in time.
        self.is_light = False
        #: Since when a slot of a limited tag is free; since when a queue, or the first row of one,
        #: waits, and how many chunks of others were sent after `PROMISED_S`.
        self._free_since: dict[str, float] = {}
        self._claimable: dict[str | int, float] = {}
        self._passed_over = Counter[str | int]()
        world.set_clock(SteppedClock(time))
        world.runtime.timer = self
        self.workers = [
            SimulatedWorker(self, number, self.chance.choice(processes)) for number in range(2)
        ]
        self.every(SWEEP_S, self._sweep)
        self.every(0.1, self.check)

    # -- the clock --------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._time.at

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        heappush(self._calls, (self.now + seconds, self.new_id(), call))

    def every(self, seconds: float, call: Callable[[], object]) -> None:
        def turn() -> None:
            call()
            self.after(seconds, turn)

        self.after(seconds * self.chance.random(), turn)

    def go_on(self, process: Process, work: Generator[float, None, None]) -> None:
        if not process.is_dead:
            for rest_s in work:
                self.after(rest_s, lambda: self.go_on(process, work))
                return

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._calls[0][0] <= until:
            self._time.at, _, call = heappop(self._calls)
            call()

    # -- the broker, beat and callers -------------------------------------------------------------

    is_up = True

    def _next_worker(self) -> SimulatedWorker:
        """Return the consumer of the next message. Brokers give each consumer one in turn."""
        self.workers.reverse()
        return self.workers[0]

    def arm(self, entries: Sequence[Entry]) -> bool:
        self.after(TRIP_S, partial(self._next_worker().receive, entries))
        return True

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        for _ in range(messages):
            self.after(TRIP_S, partial(self._next_worker().main.drain, queue, *priorities))
        return True

    def schedule(self, in_s: float, takes_s: float, is_armed: bool = True, **fields: Any) -> Row:
        due = self.now + in_s
        usual = {"queue": "default", "tag": f"takes {takes_s:g}", "priority": 0}
        fields = {**usual, **fields}
        row = Row(self.new_id(), due=due, takes_s=takes_s, **fields)
        self.table.rows[row.id] = row
        self.table.wait(row, self.now)
        if is_armed:
            row.known = due
            self.arm([row.entry])
        return row

    def _sweep(self) -> None:
        levels = defaultdict[str, set[int]](set)
        for row in self.table.rows.values():
            if row.status == "WAITING" and row.due + GRACE_S < self.now:
                levels[row.queue].add(row.priority)
                row.known = min(row.known, self.now)
        for queue, priorities in levels.items():
            self.request_drain(queue, sorted(priorities), DRAIN_MESSAGES, SWEEP_S)

    # -- what happens, and the properties ---------------------------------------------------------

    def claimable(self, entry: Entry) -> Row | None:
        row = self.table.rows[entry.id]
        is_there = row.status == "WAITING" and row.version == entry.version
        return row if is_there and row.due <= self.now else None

    def start(self, row: Row) -> None:
        row.status = "STARTED"
        for of in (row.queue, row.id):
            self._claimable.pop(of, None)
            self._passed_over.pop(of, None)
        if row.due > self.now:
            self.find("early", row)
        if self.is_light and self.now > row.known + PROMISED_S:
            self.find("a row behind slow ones starts late", row)

    def sent(self, request: ChunkRequest) -> None:
        """Count the chunks for which queues with a claimable row are passed over."""
        for of, since in self._claimable.items():
            self._passed_over[of] += self.now > since + PROMISED_S
            if self._passed_over[of] > CHUNKS_OF_OTHERS:
                self.find("passed over", of)

    def check(self) -> None:
        now = self.now
        for tag in self.table.limits:
            if self.table.free(tag) > 0:
                self._free_since.setdefault(tag, now)
            else:
                self._free_since.pop(tag, None)
        waiting = [row for row in self.table.rows.values() if self._wait_s(row) > 0]
        last_first = sorted(waiting, key=lambda row: (row.priority, -row.due, -row.id))
        first = {row.queue: row for row in last_first}
        waits: set[str | int] = {*first}
        for row in first.values():
            if row.takes_s < BUDGET_S and row.tag not in self.table.limits:
                waits.add(row.id)
        self._claimable = {of: self._claimable.get(of, now) for of in waits}
        self._passed_over = Counter({of: self._passed_over[of] for of in waits})
        idle = [
            process
            for worker in self.workers
            for process in worker.processes
            if process.request is None and now > process.idle_since + PROMISED_S
        ]
        for row in waiting if idle else ():
            if self._wait_s(row) > PROMISED_S:
                self.find("a process is idle", row)
        for worker in self.workers:
            kept = sum(now - row.due < KEPT_S for row in self.table.rows.values())
            if worker.main.waiting > kept:
                self.find("entries wait for ever", worker.main.waiting)

    def _wait_s(self, row: Row) -> float:
        """Return for how long a row could have started."""
        if row.status not in ("WAITING", "HELD"):
            return 0.0
        since = max(row.known, row.since)
        if row.tag in self.table.limits:
            since = max(since, self._free_since.get(row.tag, self.now))
        return self.now - since

    def find(self, what: str, of: object) -> None:
        self.findings.append(f"seed {self.seed}, {self.now - 1000:.2f} s: {what}: {of}")


class SteppedClock(Clock):
    def __init__(self, time: ManualTime) -> None:
        super().__init__()
        self._time = time

    def now_us(self) -> int:
        return START_US + round(self._time.at * 1e6)


# -- what callers schedule -------------------------------------------------------------------------


def light(play: Play) -> None:
    """Quick rows, and fewer slow ones than there are processes."""
    chance, processes = play.chance, sum(len(worker.processes) for worker in play.workers)
    play.is_light = True
    slow = chance.randrange(processes)
    for _ in range(slow):
        play.schedule(chance.uniform(0, 5), chance.choice([1.0, 3.0, LONG_S]))
    for _ in range(chance.randrange(20, 100)):
        queue, priority = chance.choice(["default", "mail"]), chance.choice([0, 0, 5])
        takes_s = chance.choice([0.001, 0.01])
        play.schedule(chance.uniform(0, 15), takes_s, queue=queue, priority=priority)


def backlog(play: Play) -> None:
    """Overdue rows in one queue or two, which no message names, and further ones meanwhile."""
    chance, shares = play.chance, play.chance.choice([["default"], ["default", "mail"]])
    for _ in range(chance.randrange(100, 300)):
        takes_s, queue = chance.choice([0.001, 0.02, 0.1, 0.5]), chance.choice(shares)
        play.schedule(-chance.uniform(2, 60), takes_s, is_armed=False, queue=queue)
    processes = sum(len(worker.processes) for worker in play.workers)
    for _ in range(chance.choice([0, 40]) * processes):  # more than they can run
        play.schedule(chance.uniform(1, 7), 0.2)
    for _ in range(chance.randrange(100)):
        takes_s, queue = chance.choice([0.001, 0.02, 0.1]), chance.choice(["default", "mail"])
        is_armed, priority = chance.random() < 0.9, chance.choice([0, 5])
        play.schedule(chance.uniform(0, 10), takes_s, is_armed, queue=queue, priority=priority)


def burst(play: Play) -> None:
    """Rows that fall due together, in one message, and slow ones among them."""
    chance, in_s = play.chance, play.chance.uniform(0, 3)
    for _ in range(chance.randrange(1, 4)):
        takes_s, priorities = chance.choice([0.001, 0.02, 0.2]), chance.choice([[0], [0, 5]])
        for _ in range(chance.randrange(20, 100)):
            priority, takes = chance.choice(priorities), chance.choice([takes_s] * 20 + [5.0])
            play.schedule(in_s, takes, priority=priority)
        in_s += chance.uniform(0, 3)


def limited(play: Play) -> None:
    """Rows of limited tags, some of which run for minutes, and limits that are raised."""
    chance, table = play.chance, play.table
    for tag in ("one", "two")[: chance.randint(1, 2)]:
        table.limits[tag] = chance.randint(1, 3)
        takes_s = chance.choice([0.01, 0.5, LONG_S, LONG_S])
        for _ in range(chance.randrange(5, 50)):
            play.schedule(chance.uniform(0, 8), takes_s, chance.random() < 0.9, tag=tag)
        raised, at_s = table.limits[tag] + chance.randint(1, 30), chance.uniform(4, 18)
        play.after(at_s, lambda tag=tag, to=raised: table.limits.update({tag: to}))  # type: ignore[misc]
    for _ in range(chance.randrange(50)):
        play.schedule(chance.uniform(0, 15), chance.choice([0.001, 0.1]))


#: What callers do, and how many processes a worker may have.
SCRIPTS = [
    (light, range(1, 5)),
    (backlog, range(1, 4)),
    (burst, range(1, 5)),
    (limited, (1, 3, 20)),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('dispatching') / 'world.sqlite3'}")
    with closing(store), closing(World(store, _chunk_time_budget_s=BUDGET_S)) as made:
        yield made


def play(world: World, patch: MonkeyPatch, seed: int) -> Play:
    with patch.context() as patched:
        time = ManualTime()
        time.replace(patched)
        script, processes = SCRIPTS[seed % len(SCRIPTS)]
        played = Play(world, time, seed, processes)
        chance = played.chance
        script(played)
        if not played.is_light and chance.random() < 0.3:
            for _ in range(chance.randint(1, 3)):
                played.after(chance.uniform(1, 15), chance.choice(played.workers).kill_one)
        played.run(25.0)
        world.events.clear()
        for worker in played.workers:
            worker.main.close()
    return played


def test_no_process_is_idle_and_no_row_is_passed_over(
    world: World, monkeypatch: MonkeyPatch
) -> None:
    for seed in range(QUICK_SEEDS):
        assert not play(world, monkeypatch, seed).findings


@pytest.mark.slow
def test_many_more_seeds_find_nothing(world: World, monkeypatch: MonkeyPatch) -> None:
    for seed in range(QUICK_SEEDS, SEEDS):
        assert not play(world, monkeypatch, seed).findings
