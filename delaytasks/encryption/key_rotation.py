"""Which keys the rows of one database need, and how they come to need the first one alone."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, func, select, update

from delaytasks.core.encryption import (
    MARK_LENGTH,
    NO_NAME,
    PREFIX,
    PREFIXES,
    UNBOUND_PREFIX,
    is_bound,
    is_encrypted,
    name_in,
)
from delaytasks.core.json_text import dump_json
from delaytasks.core.states import LIVE, Status
from delaytasks.encryption.cipher import Cipher
from delaytasks.storage.bulk import Bulk
from delaytasks.storage.database import Database
from delaytasks.storage.rows import json_rows, listed, parts
from delaytasks.storage.schema import BODY, RESULT, Schema

#: Rows that are read and encrypted at a time, and then locked for as long as one UPDATE takes.
STEP = 100
#: Rows that somebody has locked, or has changed since they were read, get another chance after so long.
BUSY_S = 1.0
#: Stands for a key where something is plain.
NO_KEY = ""


#: A row as it was read (id, body, result, tag), and the body and result that it is to have.
Sealed = tuple[Sequence[Any], str, str | None]


class Needs(NamedTuple):
    """How many rows need each key, by its name; before it stands `fernet:` where a text is not bound to its task. A row
    whose result has another one than its body counts twice."""

    live: Counter[str]
    finished: Counter[str]


class Rotation:
    def __init__(self, database: Database, schema: Schema, bulk: Bulk) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._cipher = schema.cipher
        self._bulk = bulk
        self.found = self.changed = self.unreadable = 0
        w = json_rows(database.url.get_backend_name(), ("id", "message_body", "result"))
        mine = listed(database, t.c.id, "ids")
        self._read = select(t.c.id, t.c.message_body, t.c.result, t.c.tag).where(mine)
        self._lock = self._read.with_for_update(skip_locked=True)
        # No move, and nothing that anybody would see: version and update_time stay.
        sealed = {"message_body": w.c.message_body, "result": w.c.result}
        self._update = update(t).where(mine, t.c.id == w.c.id).values(sealed)

    def needs(self, statuses: frozenset[Status]) -> Needs:
        needs = Needs(Counter(), Counter())
        for _, status, names in self._rows(statuses):
            (needs.live if status in LIVE else needs.finished).update(names)
        return needs

    def rotate(self, statuses: frozenset[Status], tell: Callable[[], object]) -> None:
        """In short steps; `tell` is called after each. What moves or is locked meanwhile may be left."""
        cipher = self._cipher
        assert cipher is not None, "nobody asks without keys"
        ids = array("q", (id for id, _, names in self._rows(statuses) if names - {cipher.current}))
        self.found = len(ids)
        busy = self._steps(cipher, ids, tell)
        if busy:
            time.sleep(BUSY_S)
            self._steps(cipher, busy, tell)

    def _rows(self, statuses: frozenset[Status]) -> Iterator[tuple[int, Status, set[str]]]:
        """With the names of the keys that their body and result need, as these say it."""
        t = self._t.c
        for rows in self._bulk.having(
            statuses, [t.id, t.status, _mark(t.message_body), _mark(t.result)]
        ):
            for id, status, *marks in rows:
                yield id, Status.of(status), {_name(mark) for mark in marks if mark is not None}

    def _steps(self, cipher: Cipher, ids: Sequence[int], tell: Callable[[], object]) -> list[int]:
        """Returns those that somebody has locked or changed."""
        busy: list[int] = []
        each = iter(ids)
        while batch := list(itertools.islice(each, STEP)):
            busy += self._step(cipher, batch)
            tell()
        return busy

    def _step(self, cipher: Cipher, ids: Sequence[int]) -> list[int]:
        """Nothing is locked while bodies are encrypted: what falls due meanwhile is not late."""
        read, seal = cipher.read, cipher.seal
        found = self._db.alone(lambda c: c.execute(self._read, {"ids": ids}).all())
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
        done = self._db.run(lambda: self._replace(sealed)) if sealed else set()
        self.changed, self.unreadable = (
            self.changed + len(done),
            self.unreadable + len(found) - len(sealed),
        )
        return [row[0] for row, *_ in sealed if row[0] not in done]

    def _replace(self, sealed: Sequence[Sealed]) -> set[int]:
        """Those that are still what was read, to the letter. Returns their ids."""
        ids = [row[0] for row, *_ in sealed]
        with self._db.begin() as connection:
            locked = {row[0]: tuple(row) for row in connection.execute(self._lock, {"ids": ids})}
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


def _mark(text: ColumnElement[Any]) -> ColumnElement[Any]:
    begin = func.substr(text, 1, MARK_LENGTH + 1)
    return case(
        (text.is_(None), None),
        (func.substr(text, 1, len(PREFIX)).in_(PREFIXES), begin),
        else_=NO_KEY,
    )


def _name(mark: str) -> str:
    """Another program may have written anything."""
    if not mark:
        return NO_KEY
    name = name_in(mark)
    return name if is_bound(mark) or name == NO_NAME else UNBOUND_PREFIX + name


def _is_open(text: object) -> bool:
    """SQLite's columns take more than text."""
    return isinstance(text, str) and not is_encrypted(text)


def _size(row: dict[str, Any]) -> int:
    return len(row["message_body"].encode()) + len((row["result"] or "").encode())
