"""Finds the keys that the rows of one database need, and encrypts the rows anew with the first
key. The rows are the tasks and the recurring schedules, which count as live tasks."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, func, select, update

from delaytasks.core.batches import batches
from delaytasks.core.encryption import (
    BOUND_PREFIX,
    MARK_LENGTH,
    NO_NAME,
    PREFIXES,
    UNBOUND_PREFIX,
    TextCipher,
    is_bound,
    is_encrypted,
    name_in,
)
from delaytasks.core.json_text import dump_json
from delaytasks.core.states import LIVE, Status
from delaytasks.storage.bulk import Bulk
from delaytasks.storage.database import Database
from delaytasks.storage.row_lists import json_rows, listed, parts
from delaytasks.storage.schema import BODY, RESULT, Schema

#: Rows that are read and encrypted together. They are locked only during one UPDATE.
ROTATED_ROWS = 100
#: Rows that were locked, or changed after they were read, are tried again after this time.
RETRY_AFTER_S = 1.0
#: The name in `Needs` for texts that are not encrypted.
PLAIN_TEXT = ""


#: A row as it was read (id, body, result, tag), with its new body and result.
Sealed = tuple[Sequence[Any], str, str | None]


class Needs(NamedTuple):
    """How many rows need each key, by the key's name.

    The name has the prefix `fernet:` if a text is not bound to its task. A row whose body and
    result need different keys counts twice.
    """

    live: Counter[str]
    finished: Counter[str]


class Rotation:
    def __init__(self, database: Database, schema: Schema, bulk: Bulk) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._recurring = schema.recurring
        self._cipher = schema.cipher
        self._bulk = bulk
        self.found = self.changed = self.unreadable = 0
        w = json_rows(database, ("id", "message_body", "result"))
        mine = listed(database, t.c.id, "ids")
        self._read = select(t.c.id, t.c.message_body, t.c.result, t.c.tag).where(mine)
        self._lock = self._read.with_for_update(skip_locked=True)
        # Not a move: no client sees the change, so version and update_time stay.
        sealed = {"message_body": w.c.message_body, "result": w.c.result}
        self._update = update(t).where(mine, t.c.id == w.c.id).values(sealed)

    def needs(self, statuses: frozenset[Status]) -> Needs:
        needs = Needs(Counter(), Counter())
        for _, status, names in self._rows(statuses):
            (needs.live if status in LIVE else needs.finished).update(names)
        needs.live.update(_key_of(body) for *_, body in self._schedules())
        return needs

    def rotate(self, statuses: frozenset[Status], on_batch: Callable[[], object]) -> None:
        """Encrypt in short steps, and call `on_batch` after each. Rows that move or are locked may
        be left."""
        cipher = self._cipher
        assert cipher is not None, "rotation needs keys"
        ids = array("q", (id for id, _, names in self._rows(statuses) if names - {cipher.current}))
        schedules = [row for row in self._schedules() if _key_of(row[-1]) != cipher.current]
        self.found = len(ids) + len(schedules)
        for schedule in schedules:
            self._seal_schedule(cipher, *schedule)
            on_batch()
        busy = self._steps(cipher, ids, on_batch)
        if busy:
            time.sleep(RETRY_AFTER_S)
            self._steps(cipher, busy, on_batch)

    def _rows(self, statuses: frozenset[Status]) -> Iterator[tuple[int, Status, set[str]]]:
        """Yield the ids with the names of the keys that body and result need."""
        t = self._t.c
        for rows in self._bulk.having(
            statuses, [t.id, t.status, _mark(t.message_body), _mark(t.result)]
        ):
            for id, status, *marks in rows:
                yield id, Status.of(status), {_name(mark) for mark in marks if mark is not None}

    def _schedules(self) -> Iterator[Sequence[Any]]:
        """Yield name, id, tag and body of each recurring schedule."""
        r = self._recurring.c
        for rows in self._db.stream(select(r.name, r.id, r.tag, r.message_body), ROTATED_ROWS):
            yield from rows

    def _seal_schedule(self, cipher: TextCipher, name: str, id: int, tag: str, body: str) -> None:
        """Encrypt the body of a schedule, unless it was changed after it was read."""
        r, opened = self._recurring, cipher.read(body, BODY, id, tag)
        if not _is_open(opened):
            self.unreadable += 1
            return
        same = r.c.name == name, r.c.message_body == body
        statement = update(r).where(*same).values(message_body=cipher.seal(opened, BODY, id, tag))
        self.changed += self._db.autocommitted(lambda c: int(c.execute(statement).rowcount))

    def _steps(
        self, cipher: TextCipher, ids: Sequence[int], on_batch: Callable[[], object]
    ) -> list[int]:
        """Encrypt batch by batch. Returns the ids of rows that were locked or changed."""
        busy: list[int] = []
        for batch in batches(ids, ROTATED_ROWS):
            busy += self._step(cipher, batch)
            on_batch()
        return busy

    def _step(self, cipher: TextCipher, ids: Sequence[int]) -> list[int]:
        """Encrypt one batch. No row is locked meanwhile, so due tasks are not delayed."""
        read, seal = cipher.read, cipher.seal
        found = self._db.autocommitted(lambda c: c.execute(self._read, {"ids": ids}).all())
        opened = [
            (row, read(body, BODY, id, tag), read(result, RESULT, id, tag))
            for row in found
            for id, body, result, tag in [row]
        ]
        sealed = [
            (
                row,
                seal(body, BODY, row[0], row[3]),
                None if result is None else seal(result, RESULT, row[0], row[3]),
            )
            for row, body, result in opened
            if _is_open(body) and (result is None or _is_open(result))
        ]
        done = self._replace(sealed) if sealed else set()
        self.changed += len(done)
        self.unreadable += len(found) - len(sealed)
        return [row[0] for row, *_ in sealed if row[0] not in done]

    def _replace(self, sealed: Sequence[Sealed]) -> set[int]:
        """Update the rows that are exactly as they were read, and return their ids."""

        def work(connection: Any) -> set[int]:
            ids = [row[0] for row, *_ in sealed]
            found = connection.execute(self._lock, {"ids": ids})
            locked = {row[0]: tuple(row) for row in found}
            rows = [
                {"id": row[0], "message_body": body, "result": result}
                for row, body, result in sealed
                if locked.get(row[0]) == tuple(row)
            ]
            for part in parts(rows, _size):
                values = {"rows": dump_json(part), "ids": [row["id"] for row in part]}
                met = connection.execute(self._update, values).rowcount
                assert met == len(part), "they are locked"
            return {row["id"] for row in rows}

        return self._db.transaction(work)


def _mark(text: ColumnElement[Any]) -> ColumnElement[Any]:
    begin = func.substr(text, 1, MARK_LENGTH + 1)
    return case(
        (text.is_(None), None),
        (func.substr(text, 1, len(BOUND_PREFIX)).in_(PREFIXES), begin),
        else_=PLAIN_TEXT,
    )


def _name(mark: str) -> str:
    """Return the key's name. Other programs may have written any mark."""
    if not mark:
        return PLAIN_TEXT
    name = name_in(mark)
    return name if is_bound(mark) or name == NO_NAME else UNBOUND_PREFIX + name


def _key_of(text: str) -> str:
    """Return the name of the key that a text needs."""
    return _name(text[: MARK_LENGTH + 1]) if is_encrypted(text) else PLAIN_TEXT


def _is_open(text: object) -> bool:
    """Whether this is readable text. SQLite's columns may contain other types."""
    return isinstance(text, str) and not is_encrypted(text)


def _size(row: dict[str, Any]) -> int:
    return len(row["message_body"].encode()) + len((row["result"] or "").encode())
