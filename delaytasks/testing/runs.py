"""What ran in a test, and the loop that runs it on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import select

from delaytasks.db.engines import masked
from delaytasks.model.clock import STARTED_MS, from_us
from delaytasks.model.errors import ConfigError, UnknownTagError
from delaytasks.model.moves import LIVE
from delaytasks.model.task import DelayedTask, Settlement
from delaytasks.model.text import DEFERRALS
from delaytasks.run.observers import Observer

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.run.runner import Runner
    from delaytasks.runtime import Runtime
    from delaytasks.testing.simulated import SettableClock
    from delaytasks.worker.processes import Processes


#: The most tasks that one chunk claims.
CHUNK_ROWS = 100
#: One call runs no more tasks than this: a task that schedules itself would never let it end.
MAX_RUNS = 10_000
PRIORITIES = range(10)
OF_ANOTHER_APPLICATION = (
    "; if the task is of another application, give the tests a database of their own"
)


@dataclass(frozen=True)
class Run:
    """One run of a task.

    Attributes
    ----------
    task
        The task as it was when the run began.
    outcome
        What became of the task: `"succeed"`, `"fail"`, `"schedule_retry"`, `"snooze"`,
        `"withdraw"` (cancelled), `"expire"`, or `"give_back"` if it could not run.
    at
        The time of the run by the test's clock.
    error
        The exception that the processor raised, or None.
    """

    task: DelayedTask
    outcome: str
    at: datetime
    error: BaseException | None = None


class TestRunner(Observer):
    """Sweeps and runs for one tester, and keeps the runs."""

    __test__ = False

    def __init__(self, runtime: Runtime, processes: Processes, clock: SettableClock) -> None:
        self.runs: list[Run] = []
        self._runtime = runtime
        self._clock = clock
        self._runner: Runner = processes.build_runner(self)
        #: When to look again at the waitlists of limited tags.
        self._rechecks: list[datetime] = []
        #: The number of runs before the call that is under way.
        self._earlier = 0
        self._has_looked = False

    def ended(self, settlement: Settlement, took_s: float, error: BaseException | None) -> None:
        self.runs.append(Run(settlement.task, settlement.move, self._clock.now(), error))

    def not_called(self, settlement: Settlement, claimed: datetime) -> None:
        error, why = None, settlement.error or ""
        if settlement.move != "expire":
            why += OF_ANOTHER_APPLICATION if why.startswith(DEFERRALS["no_processor"]) else ""
            error = UnknownTagError(why, "tag")
        self.ended(settlement, 0, error)

    def new_runs(self, work: Callable[[], None]) -> list[Run]:
        """Do the work, and return the runs of it."""
        if not self._has_looked:
            if self._clock.now_us() >= STARTED_MS * 1000:  # else this test's own tasks look older
                _refuse_earlier_tasks(self._runtime.store)
            self._has_looked = True
        self._earlier = len(self.runs)
        work()
        return self.runs[self._earlier :]

    def run_due(self) -> None:
        """Run what is due now, until nothing is left."""
        if self._runtime.registry.schedules:
            from delaytasks.recurring.recurring import follow

            follow(self._runtime)
        self._runtime.make_recurring_tasks()
        self._runtime.sweeper.release_resumed()
        while self._pass():
            if len(self.runs) - self._earlier > MAX_RUNS:
                raise AssertionError(
                    f"more than {MAX_RUNS:,} tasks ran in one call, and more are due: does a "
                    "processor schedule its own task again? Otherwise go forward in smaller steps"
                )

    def fast_forward(self, until: datetime) -> None:
        """Run everything that falls due up to `until`, each at its due time, and end there."""
        self.run_due()
        while (at := self._next_due(until)) is not None:
            self._clock.move_to(at)
            self.run_due()
            if any(run.outcome == "give_back" for run in self.runs[self._earlier :]):
                return
        if self._clock.now() < until:
            self._clock.move_to(until)
            self.run_due()

    def _pass(self) -> bool:
        """Run a chunk of each queue; return whether a task was claimed, and ran or was held."""
        has_claimed = False
        self._rechecks = []
        for queue in sorted({level.queue for level in self._runtime.store.sweeps.levels(0)}):
            report = self._runner.run_due(queue, PRIORITIES, CHUNK_ROWS)
            has_claimed |= report.claimed > 0
            self._rechecks += [
                self._clock.now() + timedelta(seconds=waitlist.recheck_s)
                for waitlist in report.waitlists
                if not waitlist.open
            ]
        return has_claimed

    def _next_due(self, until: datetime) -> datetime | None:
        """Return the next time at which something is to do, up to `until`."""
        runtime, now = self._runtime, self._clock.now()
        sweeps, settings = runtime.store.sweeps, runtime.settings
        times = [from_us(task.due_us) for task in sweeps.first_due_between(now, until, 1)]
        next_occurrence = sweeps.first_occurrence()
        if next_occurrence is not None:
            made_at = next_occurrence - timedelta(seconds=settings.recurring_lead_s)
            # What could not be made now is tried again as often as beat sweeps.
            again = now + timedelta(seconds=settings.sweep_s)
            times.append(made_at if made_at > now else again)
        times += self._rechecks
        times += [at for at in runtime.policy_cache.known.ends if at > now]
        return min((at for at in times if at <= until), default=None)


def _refuse_earlier_tasks(store: Store) -> None:
    """Raise an error if the database has live tasks that were scheduled before this process began.

    They are probably those of a running application, and the test would run them.
    """
    t = store.schema.tasks
    query = select(t.c.tag, t.c.id).where(
        t.c.status.in_(sorted(map(int, LIVE))), t.c.create_time < from_us(STARTED_MS * 1000)
    )
    query = query.limit(1)
    url, earlier = store.database.autocommitted(lambda c: (c.engine.url, c.execute(query).first()))
    if earlier is not None:
        raise ConfigError(
            f"the database {masked(url)} has live tasks that were scheduled before "
            f"these tests began, such as {earlier.id} (tag {earlier.tag!r}), and a test "
            "would run them: give the tests a database of their own, or begin with "
            "tester.clear() if earlier tests left them"
        )
