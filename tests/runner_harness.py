"""Runners on a store, for tests of the changes of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import update

from delaytasks import DelayTask
from delaytasks.core.clock import Clock, to_us
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Claimed, Entry, Settlement
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.task import NewTask
from delaytasks.execution.executor import Finish, ProcessorCall
from delaytasks.execution.runner import Report, Runner
from delaytasks.limits.admission import Waitlist
from delaytasks.processors.registry import Registry
from delaytasks.scheduling.producer import Producer, QueueRouting
from delaytasks.storage.claims import Claims
from delaytasks.storage.sessions import transaction_of
from delaytasks.storage.store import Store
from tests.conftest import settings_for
from tests.recording import RecordingTimer


class DisturbedClaims:
    """Claim queries that a test can disturb."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.after_claim: Callable[[], object] = lambda: None
        self.before_settle: Callable[[Sequence[Settlement]], object] = lambda settlements: None

    def claim(self, entries: Sequence[Entry]) -> Claimed:
        claimed = self._claims.claim(entries)
        self.after_claim()
        return claimed

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> Claimed:
        claimed = self._claims.claim_due(queue, priorities, limit)
        self.after_claim()
        return claimed

    def settle(self, settlements: Sequence[Settlement], on: Any = None) -> set[int]:
        self.before_settle(settlements)
        return self._claims.settle(settlements, on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._claims, name)


class RunnerHarness:
    """A runner on a store, without a worker."""

    def __init__(self, store: Store, may_detach: bool = False, **changes: Any) -> None:
        url = store.database.url.render_as_string(hide_password=False)
        self.settings = settings_for(
            url, **{"chunk_time_budget_s": 5, "strict_tags": False, **changes}
        )
        self.store = store
        self.registry, self.events, self.timer = Registry(), Events(), RecordingTimer()
        self.clock = Clock(self.store.tasks.now)
        self.waitlist = Waitlist(self.store, self.limited)
        self.claims = DisturbedClaims(
            self.store.claims("worker-1", 0x7F000001, self.waitlist.hold_if_limited)
        )
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.events.subscribe(lambda name, fields: self.told.append((name, fields)))
        self.ran: list[Any] = []
        self.registry.processor("note")(self.ran.append)
        self.runner = self.make_runner(may_detach=may_detach)
        self._ids = IdMaker(lambda: to_us(self.clock.now()) // 1000)
        queues = QueueRouting(self.settings, self.registry)
        to = (self.clock, self._ids, RecordingTimer(), self.registry, queues, self.events)
        self.producer = Producer(self.settings, self.store.tasks, *to)

    def make_runner(self, **options: Any) -> Runner:
        claims: Any = self.claims
        return Runner(
            self.settings,
            claims,
            self.waitlist,
            self.clock,
            self.registry,
            self.timer,
            self.events,
            self.execute,
            lambda session, task: (
                session and transaction_of(session, self.store.database.remedy_at)
            ),
            **options,
        )

    def limited(self) -> Mapping[str, Policy]:
        return Policies(tuple(self.store.policies.read())).limited

    @staticmethod
    def execute(call: ProcessorCall, end: Finish) -> object:
        return end(call(call.read_argument()), None)

    def schedule(
        self, tag: str = "note", body: Any = None, delay: float = 0, **options: Any
    ) -> DelayTask:
        task = self.producer.schedule(NewTask(tag, body, delay, **options), "reject", None)
        if delay:
            return task
        # SQLite's clock has milliseconds, so that a task may not be due yet at the moment of its
        # creation.
        self.change(task, expected_time=task.expected_time - timedelta(milliseconds=10))
        return self.now(task)

    def change(self, task: DelayTask | int, **values: Any) -> None:
        t = self.store.schema.tasks
        with self.store.database.begin() as connection:
            connection.execute(
                update(t)
                .where(t.c.id == (task if isinstance(task, int) else task.id))
                .values(**values)
            )

    def now(self, task: DelayTask) -> DelayTask:
        found = self.store.tasks.get(task.id)
        assert found is not None
        return found

    def run(self, *tasks: DelayTask) -> Report:
        return self.runner.run([self.entry(task) for task in tasks])

    @staticmethod
    def entry(task: DelayTask) -> Entry:
        return Entry.of(task)

    def statuses(self, tasks: Sequence[DelayTask]) -> list[str]:
        return [self.now(task).status.name for task in tasks]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.told if name == event]
