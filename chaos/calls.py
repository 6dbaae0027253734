"""The calls of a producer in all ways, and the records of their answers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Protocol

from kombu.exceptions import OperationalError
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from chaos import history
from chaos.history import Answer, Call, CallRecord, Noted
from delaytasks import DelayedTask, DelayTasks, NewTask
from delaytasks.model.clock import to_us
from delaytasks.model.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.runtime import runtime_of

#: The Celery task of a run, and the tag of the tasks that recur.
CELERY_TASK, RECURRING = "chaos.celery_note", "recurring"
#: The tolerance for the due times of calls whose answer was lost: clocks are measured less
#: precisely over slow connections.
ABOUT_US = 1_000_000
#: After how many seconds a call whose answer was lost is repeated.
REPEAT_S = 0.5


class Notes(Protocol):
    def note(self, one: Noted) -> None: ...


class RolledBackError(Exception):
    """Raised by the producer to roll its own transaction back."""


def body(seconds: float = 0, fails: int = 0, kills: int = 0) -> dict[str, float]:
    """Return the body of a task that takes this time, fails in its first runs, and kills its
    process in the runs before.
    """
    return {"s": seconds, "fails": fails, "kills": kills}


class Caller:
    """Makes calls, and notes each before it is made and then with its answer.

    If the caller dies in between, the answer stays unknown. With `is_strict`, errors are raised.
    """

    def __init__(
        self,
        delays: DelayTasks,
        notes: Notes,
        chance: random.Random,
        is_strict: bool = False,
        now_us: Callable[[], int] = history.now_us,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.delays, self.notes, self.chance, self.is_strict = delays, notes, chance, is_strict
        self.now_us, self.pause = now_us, pause
        self.app = runtime_of(delays).celery
        broker = self.app.connection_for_write()
        self._unknown: tuple[type[BaseException], ...] = (
            *(OutcomeUnknownError, OperationalError),
            *(*broker.connection_errors, *broker.channel_errors),
        )

    @cached_property
    def _engine(self) -> Engine:
        """The engine of an application. No connection is kept for longer than a transaction."""
        return create_engine(runtime_of(self.delays).store.database.url, pool_pre_ping=True)

    def close(self) -> None:
        self.delays.close()
        self._engine.dispose()

    def ask(self, call: Call, wanted: Mapping[int, float | None], ask: Callable[[], Any]) -> Answer:
        """Make a call for these tasks, each with its requested delay, and note the answer."""
        asked_us, dues = self.now_us(), dict[int, int]()

        def note(answer: Answer) -> Answer:
            for id, delay in wanted.items():
                about_us = None if delay is None else asked_us + int(delay * 1e6) - ABOUT_US
                due_us = dues.get(id, about_us)
                self.notes.note(CallRecord(id, call, answer, asked_us, self.now_us(), due_us))
            return answer

        note("unknown")
        try:
            reply = ask()
        except self._unknown:
            if self.is_strict:
                raise
            return note("unknown")
        except (DelayTaskError, RolledBackError, SQLAlchemyError):
            if self.is_strict:
                raise
            # If only the message to the workers failed, a revoke has cancelled the row.
            return note("unknown" if call == "revoke" else "failed")
        # A call that is repeated after a lost answer returns the row as it is now. The task may
        # have run meanwhile and be due again.
        if isinstance(reply, DelayedTask) and (call != "schedule" or reply.version == 0):
            dues[reply.id] = to_us(reply.expected_time)
        is_refused = call == "cancel" and not reply
        assert not (is_refused and self.is_strict), reply
        return note("failed" if is_refused else "ok")

    # -- schedule ---------------------------------------------------------------------------------

    def schedule(self, new: Sequence[NewTask], way: str = "alone", repeats: int = 0) -> Answer:
        """Schedule tasks with ids: one of them "alone", "committed" or "rolled back" in the
        caller's transaction, or "many". Repeat a call whose answer is lost.
        """
        wanted: dict[int, Any] = {each.id: each.delay for each in new if each.id is not None}
        given = {name: value for name, value in new[0]._asdict().items() if value is not None}
        one = partial(self.delays.schedule_delay, **given)
        again = partial(self.delays.schedule_many, new) if way == "many" else one
        in_transaction = way in ("committed", "rolled back")
        first = partial(self._in_own_transaction, one, way) if in_transaction else again
        answer = self.ask("schedule", wanted, first)
        for _ in range(repeats):
            if answer != "unknown":
                break
            self.pause(REPEAT_S)
            # A refusal of the repeated call does not show whether the first one succeeded.
            answer = "ok" if self.ask("schedule", wanted, again) == "ok" else "unknown"
        return answer

    def insert(self, task_body: object) -> None:
        """Insert a due row without arming it, as another program does."""
        runtime = runtime_of(self.delays)
        id, now, text = self.delays.new_id(), runtime.clock.certain_now(), json.dumps(task_body)
        task = DelayedTask(id, "note", text, now, create_time=now)
        self.ask("schedule", {id: None}, lambda: runtime.store.tasks.new.insert(task) and task)

    def call_celery_task(self, delay: float, way: str = "countdown") -> tuple[int, Answer]:
        """Call a Celery task, whose id is a number, in one of these ways or by its "eta"."""
        number = self.delays.new_id()
        options: dict[str, Any] = {"countdown": delay}
        if way == "eta":
            options = {"eta": runtime_of(self.delays).clock.now() + timedelta(seconds=delay)}
        call = partial(self.app.send_task, CELERY_TASK, task_id=str(number), **options)
        if way in ("committed", "rolled back"):
            apply = partial(self.delays.apply_async, self.app.signature(CELERY_TASK))
            in_session = partial(apply, task_id=str(number), **options)
            call = partial(self._in_own_transaction, in_session, way)
        return number, self.ask("schedule", {number: delay}, call)

    def _in_own_transaction(self, call: Callable[..., Any], way: str) -> Any:
        """Call in the producer's own transaction, as an application does that writes its own
        rows.
        """
        session = Session(self._engine)
        try:
            reply = call(session=session)
            if way == "rolled back":
                raise RolledBackError
            try:
                session.commit()
            except SQLAlchemyError as error:
                raise OutcomeUnknownError(str(error), 0) from error
            return reply
        finally:
            with suppress(SQLAlchemyError):  # the connection broke, so the answer stays unknown
                session.close()

    # -- change -----------------------------------------------------------------------------------

    def cancel(self, id: int) -> Answer:
        return self.ask("cancel", {id: None}, partial(self.delays.cancel, id))

    def rerun(self, id: int, delay: float) -> Answer:
        return self.ask("rerun", {id: delay}, partial(self.delays.rerun, id, delay))

    def reschedule(self, id: int, delay: float) -> Answer:
        return self.ask("reschedule", {id: delay}, partial(self.delays.reschedule, id, delay))

    def revoke(self, number: int) -> Answer:
        return self.ask("revoke", {number: None}, partial(self.app.control.revoke, str(number)))
