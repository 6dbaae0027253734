"""`DelaysTester`, the object that tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.api import instance_of_process
from delaytasks.core.celery_calls import Callback, Message
from delaytasks.runtime import runtime_of
from delaytasks.storage.borrowed_connections import source_of
from delaytasks.testing.assertions import TaskAssertions
from delaytasks.testing.instance_in_test import InstanceInTest
from delaytasks.testing.senders import SentTask
from delaytasks.testing.task_runs import TaskRuns
from delaytasks.testing.time_travel import TimeTravel

if TYPE_CHECKING:
    from typing_extensions import Self

    from delaytasks.client import DelayTasks


class DelaysTester(TaskAssertions, TaskRuns, TimeTravel):
    """Runs the tasks of a `DelayTasks` in a test, without a broker and without waiting.

    Inside the `with` block, or between `start` and `stop`, the instance writes and runs tasks with
    the same code as in production. Only the clock, the broker and HTTP callbacks are replaced.

    Parameters
    ----------
    delays
        The instance. By default the one of the Django project, of the Flask app, or of the
        current Celery app.
    bind
        The SQLAlchemy Engine, Connection or Session of the test, or an asynchronous one. All
        statements run on it, and in its transaction, which the test rolls back at the end.
        Without it, the tester uses the database of the settings and commits. With Django, it
        always uses Django's connection.
    run_inline
        Run each task when its transaction is committed, whatever its delay.

    Examples
    --------
    >>> with DelaysTester(delays) as tester:
    ...     place_order(7)
    ...     tester.assert_scheduled("order.close", key="7", within="30m")
    ...     tester.fast_forward("30m")
    """

    def __init__(
        self, delays: DelayTasks | None = None, *, bind: Any = None, run_inline: bool = False
    ) -> None:
        instance = InstanceInTest(
            delays if delays is not None else instance_of_process(),
            None if bind is None else source_of(bind),
            run_inline,
        )
        super().__init__(instance)
        #: The Celery tasks that waited as rows and were sent, in their order.
        self.sent_tasks: list[SentTask] = instance.sent_tasks
        #: The HTTP callbacks that were sent.
        self.sent_callbacks: list[Callback] = instance.sent_callbacks
        #: The messages to queues that were sent.
        self.sent_messages: list[Message] = instance.sent_messages

    def start(self) -> Self:
        """Begin the test. `with` calls this.

        Returns
        -------
        DelaysTester
            This object.

        Examples
        --------
        >>> class OrderTest(TestCase):
        ...     def setUp(self):
        ...         self.delays = DelaysTester().start()
        ...         self.addCleanup(self.delays.stop)
        """
        self._instance.start()
        return self

    def stop(self) -> None:
        """End the test: the instance is again as it was before `start`.

        Examples
        --------
        >>> tester.stop()
        """
        self._instance.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def clear(self) -> None:
        """Delete all tasks, schedules and policies, for tests whose transactions are committed.

        Examples
        --------
        >>> tester.clear()
        """
        self._instance.require_started()
        runtime_of(self._instance.delays).store.clear()
