"""Requests that are repeated with the same Idempotency-Key schedule one task.

The meta of the task has a mark: a hash of the API key's name and the Idempotency-Key. The mark is
written with the row, so neither exists without the other. A task without a key gets one that is
made of the mark, because two live tasks cannot have the same key: of two simultaneous requests, one
inserts its row and the other returns that row.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any, NamedTuple

from delaytasks.client import DelayTasks
from delaytasks.core.errors import DuplicateTaskError, SessionUnusableError
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.new_task import NewTask
from delaytasks.core.task import DelayTask
from delaytasks.http_api.problems import RefusedRequestError
from delaytasks.http_api.requests import ApiRequest
from delaytasks.wiring import wiring_of

#: The names in the meta of a task.
MARK, CONTENT = "idempotency_key", "idempotency_content"
_KEY_START = "idempotency:"
_HASH_DIGITS = 32


class IdempotencyMark(NamedTuple):
    """Hashes of the caller with its Idempotency-Key, and of the request."""

    mark: str
    content: str

    @classmethod
    def of(cls, request: ApiRequest, item: Any, index: int = 0) -> IdempotencyMark | None:
        """Return the mark of one task of a request, or None without an Idempotency-Key.

        Parameters
        ----------
        item
            The part of the body that describes the task.
        index
            The place of the task in a batch.
        """
        if request.idempotency_key is None:
            return None
        caller = json.dumps([request.key.name, request.idempotency_key, index])
        return cls(_hash(caller), _hash(json.dumps(item, sort_keys=True)))


class _ScheduledBeforeError(Exception):
    """A request with the same mark has been committed. Rolls the transaction back."""

    def __init__(self, task: DelayTask) -> None:
        super().__init__(task.id)
        self.task = task


def schedule(
    delays: DelayTasks, new: NewTask, on_conflict: OnConflict, mark: IdempotencyMark | None
) -> DelayTask:
    """Schedule a task, unless a request with this mark has scheduled it."""
    if mark is None:
        return _schedule(delays, new, on_conflict)
    meta = {**(new.meta or {}), MARK: mark.mark, CONTENT: mark.content}
    if new.key is None:
        new, on_conflict = new._replace(key=_KEY_START + mark.mark), "keep"
    new = new._replace(meta=meta)
    task = _found(delays, new) or _scheduled_once(delays, new, on_conflict)
    if task.meta.get(MARK) == mark.mark and task.meta.get(CONTENT) != mark.content:
        raise RefusedRequestError(
            422, "Another request was made with this Idempotency-Key: use a new one."
        )
    return task


def _scheduled_once(delays: DelayTasks, new: NewTask, on_conflict: OnConflict) -> DelayTask:
    database = wiring_of(delays).router.shard_for(new.tag, str(new.key)).store.database
    try:
        return database.transaction(partial(_insert, delays, new, on_conflict))
    except _ScheduledBeforeError as before:
        return before.task
    except (DuplicateTaskError, SessionUnusableError):
        # The live task with this key may be that of a simultaneous request with the same mark.
        # On MariaDB, the wait for the lock of that task may have timed out.
        found = _found(delays, new)
        if found is None:
            raise
        return found


def _insert(delays: DelayTasks, new: NewTask, on_conflict: OnConflict, on: Any) -> DelayTask:
    """Write the row, then look for another one with the mark, and roll back if there is one.

    Another request may have written a row since the first look. If that task has ended, no unique
    key prevents this insert. The second look comes after the insert, because from then on the key
    of this row prevents further inserts.
    """
    task = _schedule(delays, new, on_conflict, on)
    before = _found(delays, new, on, task.id)
    if before is not None:
        raise _ScheduledBeforeError(before)
    return task


def _schedule(
    delays: DelayTasks, new: NewTask, on_conflict: OnConflict, session: Any = None
) -> DelayTask:
    wiring = wiring_of(delays)
    return wiring.router.schedule(new, on_conflict, wiring.transactions.of(session))


def _found(
    delays: DelayTasks, new: NewTask, session: Any = None, other_than: int | None = None
) -> DelayTask | None:
    """Return the task of an earlier request with the same mark."""
    marked = {MARK: (new.meta or {})[MARK]}
    page = delays.find(tag=new.tag, key=new.key, meta=marked, limit=2, session=session)
    return next((task for task in page if task.id != other_than), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_DIGITS]
