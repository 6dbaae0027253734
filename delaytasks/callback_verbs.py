"""The verbs for tasks whose work is somebody else's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from delaytasks.core.interfaces import OnConflict
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.task import DelayTask
from delaytasks.verbs import Verbs
from delaytasks.webhooks.http import CALLBACK
from delaytasks.webhooks.queue import MESSAGE

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.webhooks.http import HttpCallbacks
    from delaytasks.webhooks.queue import QueueMessages


class Options(TypedDict, total=False):
    """As in `schedule_delay`."""

    key: str | None
    on_conflict: OnConflict
    max_wait: float | str | timedelta | None
    queue: str | None
    priority: int
    id: int | None
    retry: RetrySchedule | str | int | None
    expires: float | str | timedelta | None
    concurrency_key: str | None
    session: Any


class CallbackVerbs(Verbs):
    @property
    @abstractmethod
    def http_callbacks(self) -> HttpCallbacks: ...

    @property
    @abstractmethod
    def queue_messages(self) -> QueueMessages: ...

    def schedule_callback(
        self,
        url: str,
        body: Any,
        delay: float | timedelta,
        *,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[Options],
    ) -> DelayTask:
        """POSTs `body` as JSON to `url`, `delay` seconds (or a timedelta) from now, until it is answered with 2xx.

        A failed attempt climbs the ladder, `NOTIFY` unless `retry` is another one; 410 ends it. `ForbiddenURLError`
        unless the URL is https to a public host, or the setting `callback_allow` opens it. The other options are those
        of `schedule_delay`; keys are shared by all callbacks.
        """
        content = self.http_callbacks.content(url, body, headers)
        return self.schedule_delay(CALLBACK, content, delay, **options)

    def schedule_message(
        self,
        to: str,
        body: Any,
        delay: float | timedelta,
        *,
        exchange: str = "",
        headers: Mapping[str, str | int | float | bool] | None = None,
        **options: Unpack[Options],
    ) -> DelayTask:
        """Sends `body` as a JSON message to the queue `to`, `delay` seconds (or a timedelta) from now, until the broker
        has it: the app's, or that of the setting `callback_broker_url`.

        With an `exchange`, which AMQP has, `to` is the routing key. The other options are those of `schedule_delay`,
        with `queue` for the task's own; keys are shared by all messages.
        """
        return self.schedule_delay(
            MESSAGE, self.queue_messages.content(to, body, exchange, headers), delay, **options
        )
