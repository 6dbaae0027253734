"""HTTP callbacks and messages to queues."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import Clock
from delaytasks.core.settings import Settings
from delaytasks.timers.publisher import bounded_connection

if TYPE_CHECKING:
    from delaytasks.webhooks.http_callbacks import HttpCallbacks
    from delaytasks.webhooks.queue_callbacks import QueueMessages


class Callbacks:
    """Imports the package `webhooks` when a callback is configured, scheduled or sent."""

    def __init__(self, celery_app: Any, settings: Settings, clock: Clock) -> None:
        self._celery = celery_app
        self._settings = settings
        self._clock = clock
        if settings.callback_allow or settings.callback_secrets:
            _ = self.http  # checks these settings

    @cached_property
    def http(self) -> HttpCallbacks:
        from delaytasks.webhooks.http_callbacks import Guard, HttpCallbacks

        return HttpCallbacks(self._settings, Guard(self._settings.callback_allow), self._clock)

    @cached_property
    def queue(self) -> QueueMessages:
        from delaytasks.webhooks.queue_callbacks import QueueMessages

        limit_s, url = self._settings.callback_connect_s, self._settings.callback_broker_url
        connect = partial(bounded_connection, self._celery, limit_s, url, confirm_publish=True)
        return QueueMessages(connect, limit_s)

    def close(self) -> None:
        for name in ("http", "queue"):
            if name in self.__dict__:  # otherwise nothing was sent
                getattr(self, name).close()
