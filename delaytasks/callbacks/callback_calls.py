"""The calls that schedule callbacks: `delays.callbacks`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.model.inputs import CALLBACK, MESSAGE, Delay
from delaytasks.model.task import DelayedTask, NewTask
from delaytasks.twins import CallGroup, twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.model.task import OnConflict, TaskOptions


class CallbackCalls(CallGroup):
    """Callbacks to other systems, as `delays.callbacks`.

    Each method has an asynchronous twin for coroutines, such as `apost` for `post`.

    Examples
    --------
    >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
    >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
    """

    def post(
        self,
        url: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a POST of `body` as JSON to `url`, repeated until the answer is 2xx.

        An attempt that fails is retried by `RetrySchedule.NOTIFY`, unless `retries` is given. The
        answer 410 ends the task.

        Parameters
        ----------
        url
            An https URL of a public host, or a URL that the setting `callback_allow` allows.
        body
            Any value that JSON can represent.
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        at
            An aware datetime, instead of `delay`.
        headers
            Additional HTTP headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`. All callbacks share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        ForbiddenURLError
            If callbacks may not go to the URL.
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
        """
        content = self._runtime.http_callbacks.content(url, body, headers)
        return self._schedule(
            NewTask(CALLBACK, content, delay, at, **options), on_conflict, session
        )

    apost = twin(post)

    def publish(
        self,
        to: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        exchange: str = "",
        headers: Mapping[str, str | int | float | bool] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a message to a broker queue, repeated until the broker has accepted it.

        Parameters
        ----------
        to
            The queue, or with `exchange` the routing key.
        body, delay, at
            See `post`.
        exchange
            An AMQP exchange. By default the message goes directly to the queue.
        headers
            Message headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`; `queue` is the queue of the task itself. All messages
            share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        See Also
        --------
        The setting `callback_broker_url` names another broker than that of the Celery app.

        Examples
        --------
        >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
        """
        content = self._runtime.queue_callbacks.content(to, body, exchange, headers)
        return self._schedule(NewTask(MESSAGE, content, delay, at, **options), on_conflict, session)

    apublish = twin(publish)

    def _schedule(self, new: NewTask, on_conflict: OnConflict, session: Any) -> DelayedTask:
        runtime = self._runtime
        return runtime.producer.schedule(new, on_conflict, runtime.transactions.of(session))
