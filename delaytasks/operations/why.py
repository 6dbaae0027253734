"""Explains why a task has not run, or how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.why import Explanation, Reason, TransportFacts, why
from delaytasks.operations.tasks import TaskReference, find_id, name_of
from delaytasks.storage.facts import FactReader
from delaytasks.timers.broker_link import broker_error

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class Explanations:
    """Gathers the facts about a task from its database, the broker and the timer."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings

    def of(self, task: object, tag: str | None = None, key: str | None = None) -> Explanation:
        """Explain a task that is named by its id, by an earlier read, or by its tag and key.

        The task is read again. An unavailable database is itself the explanation.

        Raises
        ------
        TaskNotFoundError
            If there is no such task, or it was purged.
        """
        name = name_of(task, tag, key)
        try:
            store = self._runtime.store
            found = store.tasks.read(find_id(store, name, None))
            facts = FactReader(store, self._settings).of(found, self._transport(found))
        except StoreUnavailableError as error:
            return Explanation(_id_in(name), None, [_unreachable(error)])
        return Explanation(found.id, found, why(facts))

    def _transport(self, task: DelayTask) -> TransportFacts:
        """Ask broker and timer, if the task waits for them now."""
        if not self._settings.uses_broker or not self._is_due_soon(task):
            return TransportFacts()
        queue = self._runtime.publisher.queue(task.queue)
        error = broker_error(self._runtime.celery, queue, self._settings.publish_limit_s)
        return TransportFacts(error, self._timer_error(task.queue))

    def _is_due_soon(self, task: DelayTask) -> bool:
        if task.status is not Status.NOT_COMPLETE:
            return False
        horizon_s, clock = self._settings.horizon_s, self._runtime.clock
        wait_s = (task.expected_time - clock.now()).total_seconds()
        return horizon_s is None or wait_s <= horizon_s

    def _timer_error(self, queue: str) -> str | None:
        redis_timer = self._runtime.redis_timer
        if redis_timer is None or redis_timer.counts([queue]) is not None:
            return None
        return f"no answer within {self._settings.publish_limit_s:g} s"


def _id_in(name: TaskReference) -> int | None:
    return None if isinstance(name, tuple) else id_of(name)


def _unreachable(error: StoreUnavailableError) -> Reason:
    return Reason(
        "unreachable",
        f"The database cannot be read, so the task waits at least until it can: {error}.",
        "Bring the database back; workers continue by themselves.",
        {"error": str(error)},
    )
