"""Celery calls with a delay become rows, rows become messages again, and a revoke cancels them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.app.task import extract_exec_options
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.uuid import uuid

from delaytasks.broker.link import UNWRITABLE, OutageError, Outgoing, check_headers
from delaytasks.durable_eta.capture import CapturingProducer, StoredMessage, new_task, store_revoked
from delaytasks.model.clock import MAX_ID
from delaytasks.model.errors import BodyRefusedError, ConfigError, DelayTaskError, InvalidInputError
from delaytasks.model.inputs import celery_key
from delaytasks.model.moves import Done, Fail, Outcome, Retry, Snooze
from delaytasks.model.task import DelayedTask, Transaction, connection_of
from delaytasks.operate.single_tasks import cancel_task

if TYPE_CHECKING:
    from delaytasks.attachment import CeleryCall
    from delaytasks.runtime import Runtime

#: Messages that the broker has not confirmed are published again after this time.
OUTAGE_S = 5.0

Send = Callable[..., Any]


def called_task(body: object) -> str | None:
    """Return the Celery task that a row of a recurring schedule calls when it is due.

    The result is None for the body of another row, which has a prepared message. The id of the
    called task is the id of the row.
    """
    if isinstance(body, Mapping) and isinstance(body.get("task"), str):
        return str(body["task"])
    return None


class CeleryTasks:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._app = runtime.celery
        self._settings = runtime.settings
        self._transactions = runtime.transactions
        self._clock = runtime.clock
        self._events = runtime.events

    # -- schedule ---------------------------------------------------------------------------------

    def send(self, send: Send, call: CeleryCall, *more: Any, **options: Any) -> Any:
        """Write the message as a row that `send`, the app's `send_task`, would send to the broker.

        `send` is called without a due time and with a producer that stores the message. It routes
        and serializes the message, sends Celery's signals and returns the result.
        """
        own_producer = call.producer or options.get("publisher")
        connection = call.connection or getattr(own_producer, "connection", None)
        self._refuse_other_broker(call.name, connection)
        call = call._replace(task_id=call.task_id or uuid())
        is_retry = self._is_retry(call, options)
        # An exception ends a task that is retried, and so may roll back its transaction.
        transaction = None if is_retry else self._transactions.of(None)
        store = partial(self._schedule, call, transaction)
        try:
            with self._app.producer_or_acquire(own_producer) as producer:
                captured = call._replace(
                    countdown=None,
                    eta=None,
                    producer=CapturingProducer(self._app, producer, store),
                    connection=None,
                )
                silent = {**options, "event_dispatcher": _NoTaskSentEvents}
                return send(*captured, *more, **silent)
        except DelayTaskError as error:
            if not is_retry:
                raise
            # Celery would drop the task: it rejects a task whose retry cannot be sent.
            self._events.emit(
                "celery_task.not_stored", id=call.task_id, task=call.name, error=error
            )
            return send(*call, *more, **options)

    def _schedule(
        self, call: CeleryCall, transaction: Transaction | None, message: StoredMessage
    ) -> None:
        delay = when = None
        if call.eta and not call.countdown:
            when = self._instant(call.eta)
        else:
            delay = max(call.countdown or 0, 0)
        new = new_task(call.name, str(call.task_id), message, delay, when)
        try:
            self._check_headers(message)
            self._runtime.producer.schedule(new, "take", transaction)
        except InvalidInputError as error:
            if error.argument not in ("body", "headers"):
                raise
            raise InvalidInputError(
                f"the Celery task {call.name} cannot wait as a row: {error}; pass the name of "
                "stored data, or call the task with durable_eta=False",
                error.argument,
            ) from None

    def _check_headers(self, message: StoredMessage) -> None:
        if self._app.connection_for_write().transport.driver_type == "amqp":
            try:
                check_headers(message.headers)
            except UNWRITABLE as error:
                raise InvalidInputError(str(error), "headers") from None

    def _refuse_other_broker(self, name: str, connection: Any) -> None:
        """Raise an error if the caller's connection is not to the broker of the app."""
        if connection is None or connection.as_uri() == self._app.connection_for_write().as_uri():
            return
        raise ConfigError(
            f"the connection for the Celery task {name} is to {connection.as_uri()}, and the row "
            "will be published to the broker of the app: call the task with durable_eta=False"
        )

    def _is_retry(self, call: CeleryCall, options: Mapping[str, Any]) -> bool:
        """Return whether the running Celery task sends itself again."""
        task = self._app.current_worker_task
        return bool(options.get("retries")) and task is not None and task.request.id == call.task_id

    def delay_s(self, call: CeleryCall) -> float:
        """Return in how many seconds a call is due."""
        if call.countdown:
            return float(call.countdown)
        return (self._instant(call.eta) - self._clock.certain_now()).total_seconds()

    def _instant(self, eta: Any) -> datetime:
        """Return the instant that Celery's worker reads from an eta."""
        instant: datetime = maybe_make_aware(maybe_iso8601(eta), self._app.conf.timezone)
        return instant

    # -- publish ----------------------------------------------------------------------------------

    def publish(self, bodies: Sequence[Any], tasks: Sequence[DelayedTask]) -> list[Outcome]:
        """Publish the messages of rows that are due; the processor of all `celery:` tags."""
        outcomes: list[Outcome] = [Done()] * len(bodies)
        numbers, messages = list[int](), list[Outgoing]()
        for number, (body, task) in enumerate(zip(bodies, tasks, strict=True)):
            try:
                messages.append(self._message(body, task).outgoing(self._app, self._clock))
            except BodyRefusedError as error:
                outcomes[number] = Fail(str(error))
            except Exception as error:  # for example of a router that reads a database
                outcomes[number] = Retry(reason=f"{type(error).__name__}: {error}")
            else:
                numbers.append(number)
        outage = None
        results = self._runtime.confirming_links.publish(messages) if messages else ()
        for number, reason in zip(numbers, results, strict=True):
            if isinstance(reason, OutageError):
                outcomes[number], outage = Snooze(OUTAGE_S), reason
            elif reason is not None:
                outcomes[number] = Retry(reason=f"{type(reason).__name__}: {reason}")
        if outage is not None:
            count = sum(isinstance(outcome, Snooze) for outcome in outcomes)
            self._events.emit("celery_task.not_published", count, error=outage)
        return outcomes

    def _message(self, body: Any, task: DelayedTask) -> StoredMessage:
        """Return the message of a row. That of a recurring task is prepared now: its row has the
        call, and the id of the Celery task is the id of the row."""
        name = called_task(body)
        if name is None:
            return StoredMessage.of_body(body)
        id, prepared = str(task.id), list[StoredMessage]()
        with self._app.producer_or_acquire() as producer:
            options = {
                **self._own_options(name),
                **(body.get("options") or {}),
                "task_id": id,
                "producer": CapturingProducer(self._app, producer, prepared.append),
                "event_dispatcher": _NoTaskSentEvents,
                "add_to_parent": False,
            }
            self._app.send_task(name, body.get("args"), body.get("kwargs"), **options)
        [message] = prepared
        # Celery takes the task that publishes for the parent.
        return message._replace(headers={**message.headers, "root_id": id, "parent_id": None})

    def _own_options(self, name: str) -> dict[str, Any]:
        """Return the options that `@app.task` gives to the messages of a task.

        Before Celery 5.7, `send_task` does not read them.
        """
        if name not in self._app.tasks:
            return {}
        task = self._app.tasks[name]
        own = extract_exec_options(task)
        given = {option: value for option, value in own.items() if value is not None}
        return {"ignore_result": task.ignore_result, **given}


class _NoTaskSentEvents:
    """The event `task-sent` is not sent before the message is."""

    @staticmethod
    def publish(*args: Any, **options: Any) -> None: ...


# -- Cancels the waiting rows of Celery tasks that are revoked ------------------------------------


_ID = re.compile(r"[0-9]{1,19}")


class Revocations:
    def __init__(self, runtime: Runtime) -> None:
        self._app = runtime.celery
        self._tasks = runtime.store.tasks
        self._transactions = runtime.transactions
        self._runtime = runtime

    def revoke(self, task_ids: Iterable[str]) -> None:
        """Cancel the waiting rows of these Celery tasks, and store the state REVOKED of each.

        A row that is being published is asked to stop. If its worker dies before it has published
        the message, no other worker publishes it.
        """
        names = [str(task_id) for task_id in task_ids]
        keys = {celery_key(name) for name in names}
        # The id of a recurring Celery task is the id of its row.
        ids = [int(name) for name in names if _ID.fullmatch(name) and int(name) <= MAX_ID]
        with self._transactions.guard(None) as transaction:
            on = connection_of(transaction)
            live = self._tasks.celery_rows(sorted(keys), ids, on)
            revoked = [row for row in live if row.key in keys or self._called_task(row)]
            self._cancel(revoked, transaction)

    def _cancel(self, live: Iterable[DelayedTask], transaction: Transaction | None) -> None:
        cancelled = [task for task in live if cancel_task(self._runtime, task.id, running=True)]
        if cancelled and transaction is not None:
            transaction.after_commit(cancelled, self._store_revoked)
        else:
            self._store_revoked(cancelled)

    def _store_revoked(self, tasks: Sequence[DelayedTask], is_committed: bool = True) -> None:
        for task in tasks:
            if message := self._readable(task):
                store_revoked(self._app, message)

    def _readable(self, task: DelayedTask) -> StoredMessage | None:
        """Return the message of a row; None if another program wrote it, or without its key."""
        if name := self._called_task(task):
            return StoredMessage.of_call(name, str(task.id))
        try:
            return StoredMessage.of_body(task.body)
        except (DelayTaskError, ValueError):
            return None

    def _called_task(self, task: DelayedTask) -> str | None:
        """Return the Celery task that a row of a recurring schedule will call, else None."""
        try:
            return called_task(task.body)
        except (DelayTaskError, ValueError):
            return None
