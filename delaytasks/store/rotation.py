"""Which keys the rows of one database need, and how they come to need the first one alone."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, func, select, update

from delaytasks.core.encryption import NAME_LENGTH, PREFIX, is_encrypted, name_in
from delaytasks.core.jsontext import dump_json
from delaytasks.core.states import LIVE, Status
from delaytasks.store.bulk import Bulk
from delaytasks.store.cipher import Cipher
from delaytasks.store.database import Database
from delaytasks.store.rows import json_rows, listed, parts
from delaytasks.store.schema import Schema

#: Rows that are locked at a time, for as long as their bodies take to be encrypted.
STEP = 100
#: Rows that somebody has locked get another chance after so long.
BUSY_S = 1.0
#: Stands for a key where something is plain.
NO_KEY = ""


class Needs(NamedTuple):
    """How many rows need each key, by its name. A row whose result has another one than its body counts twice."""

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
        self._lock = select(t.c.id, t.c.message_body, t.c.result).where(mine).with_for_update(skip_locked=True)
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
        for rows in self._bulk.having(statuses, [t.id, t.status, _name(t.message_body), _name(t.result)]):
            for id, status, *names in rows:
                yield id, Status.of(status), {_shown(name) for name in names if name is not None}

    def _steps(self, cipher: Cipher, ids: Sequence[int], tell: Callable[[], object]) -> list[int]:
        """Returns those that somebody has locked."""
        busy: list[int] = []
        each = iter(ids)
        while lot := list(itertools.islice(each, STEP)):
            changed, unreadable, left = self._db.run(lambda lot=lot: self._step(cipher, lot))  # type: ignore[misc]
            self.changed, self.unreadable = self.changed + changed, self.unreadable + unreadable
            busy += left
            tell()
        return busy

    def _step(self, cipher: Cipher, ids: Sequence[int]) -> tuple[int, int, list[int]]:
        with self._db.begin() as connection:
            locked = connection.execute(self._lock, {"ids": ids}).all()
            opened = [(id, cipher.read(body), cipher.read(result)) for id, body, result in locked]
            rows = [
                {"id": id, "message_body": cipher.seal(body), "result": None if result is None else cipher.seal(result)}
                for id, body, result in opened
                if _is_open(body) and (result is None or _is_open(result))
            ]
            for part in parts(rows, _size):
                values = {"rows": dump_json(part), "ids": [row["id"] for row in part]}
                met = connection.execute(self._update, values).rowcount
                assert met == len(part), "they are locked"
        return len(rows), len(locked) - len(rows), sorted(set(ids) - {row[0] for row in locked})


def _name(text: ColumnElement[Any]) -> ColumnElement[Any]:
    name = func.substr(text, len(PREFIX) + 1, NAME_LENGTH)
    return case((text.is_(None), None), (func.substr(text, 1, len(PREFIX)) == PREFIX, name), else_=NO_KEY)


def _shown(name: str) -> str:
    """Another program may have written anything."""
    return name_in(PREFIX + name) if name else NO_KEY


def _is_open(text: object) -> bool:
    """SQLite's columns take more than text."""
    return isinstance(text, str) and not is_encrypted(text)


def _size(row: dict[str, Any]) -> int:
    return len(row["message_body"].encode()) + len((row["result"] or "").encode())
