"""Rows as workers see them: claimed, settled, renewed, one statement for many rows each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    String,
    Update,
    and_,
    any_,
    bindparam,
    case,
    func,
    literal,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from delaytasks.core.clock import to_us
from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.ports import Entry, Executor, Miss, Settlement
from delaytasks.core.states import FINISHED, MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.store.attempts import Attempts
from delaytasks.store.backlog import BEGINNING, Backlog
from delaytasks.store.database import Database
from delaytasks.store.handover import Handover
from delaytasks.store.keys import Keys
from delaytasks.store.lines import Candidate, Limited, Lines
from delaytasks.store.prepared import Prepared
from delaytasks.store.rows import (
    CLAIMED,
    MOST,
    columns,
    dump_rows,
    instant_text,
    json_rows,
    listing,
    next_version,
    one_more,
    task_of,
)
from delaytasks.store.schema import Schema
from delaytasks.store.types import UTCDateTime, db_now, db_now_plus, is_past, once

#: More than any row has.
ANY_LAPSES = MOST
#: Moves after which nobody can tell that the task was claimed, and those that do not count as an attempt.
NEVER_RAN = frozenset({"give_back", "expire"})
RETURNS_ATTEMPT = NEVER_RAN | {"snooze"}
#: Failed attempts, which are kept.
MISSES = frozenset({"fail", "climb"})
#: Bytes of error texts in one statement. Quoted for JSON and then for SQL they may be several times as long, and
#: MariaDB takes 16 MB.
MAX_TEXT = 2_000_000


class Pick(NamedTuple):
    """A way to choose rows: the candidates alone, and the statement that chooses, takes and returns them at once."""

    candidates: Prepared
    take: Prepared


class Claims:
    """Claims for one worker process, whose name and address its rows carry."""

    def __init__(
        self, database: Database, schema: Schema, worker: str, ip: int | None, lease_s: float, limited: Limited
    ) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._keys = Keys(database, schema)
        self._attempts = Attempts(database, schema)
        self._shard = schema.shard
        self._columns = columns(schema, CLAIMED)
        self._worker = worker
        self._dialect = dialect = database.url.get_backend_name()
        self._claimed = {
            "status": int(MOVES["claim"].target),
            "version": next_version(t.c.version),
            "attempts": one_more(t.c.attempts),
            "execution_time": db_now(),
            "lease_until": db_now_plus(lease_s),
            "update_time": db_now(),
            "worker": worker,
            "ip_address": ip,
        }
        listed = self._is_listed() if database.can.array_parameters else t.c.id.in_(listing("ids"))
        self._taking = Prepared(database, update(t).where(listed).values(self._claimed).returning(*self._columns))
        self._candidate = candidate = columns(schema, Candidate._fields)
        wanted = json_rows(dialect, ("id", "version", "status", "lapses"))
        named = and_(
            t.c.id == wanted.c.id,
            t.c.version == wanted.c.version,
            # As columns of the list, though they are the same for all. As constants, the status would be a way in
            # through an index of all rows that wait; and planners would expect one row, and compare each with each.
            t.c.status == wanted.c.status,
            t.c.lapses <= wanted.c.lapses,
            t.c.expected_time <= db_now(),
        )
        pick = select(*candidate).join(wanted, named).order_by(t.c.id)
        if database.can.array_parameters:
            pick = pick.where(self._is_listed())
        self._named = self._pick(pick, is_planned_once=True)
        status: ColumnElement[int] = literal(int(Status.NOT_COMPLETE))
        queue, priority = bindparam("due_queue", type_=String), bindparam("due_priority", type_=Integer)
        waiting = and_(t.c.status == status, t.c.queue == queue, t.c.priority == priority)
        since = bindparam("due_since", type_=UTCDateTime())
        due = and_(t.c.expected_time >= since, t.c.expected_time <= once(db_now()))
        if database.can.row_ranges:
            # A range that only the index of live rows knows. In the other one all that ran before comes first.
            level = tuple_(t.c.status, t.c.queue, t.c.priority, t.c.expected_time)
            due = and_(
                level >= tuple_(status, queue, priority, since),
                level <= tuple_(status, queue, priority, once(db_now())),
            )
        # Planned each time: how many of them to expect is to be known, not guessed.
        self._due = self._pick(
            select(*candidate)
            .where(waiting, due, t.c.lapses <= 0)
            .order_by(t.c.expected_time)
            .limit(bindparam("due_limit"))
        )
        self._suspect = self._pick(
            select(*candidate)
            .where(waiting, is_past(t.c.expected_time, db_now()), t.c.lapses > 0)
            # By lapses first, also because in the order of time alone MySQL would walk the index of all past rows.
            .order_by(t.c.lapses, t.c.expected_time)
            .limit(1)
        )
        self._backlog = Backlog()
        self._settle = Prepared(database, self._settle_statement())
        handover = Handover(database, schema, self._claimed, self._columns)
        self.lines = Lines(database, schema, self._take_held, handover, limited)

    # -- claim ------------------------------------------------------------------------------------

    def claim(self, entries: Sequence[Entry]) -> list[DelayTask]:
        """Those of the entries that are due, unchanged, and nobody else's. Rows that lapsed are left out."""
        if not entries:
            return []
        return self._claim(self._named, self._naming([(entry.id, entry.version) for entry in entries], 0))

    def claim_alone(self, id: int, version: int) -> DelayTask | None:
        """One row, whether it lapsed before or not: a row that kills its worker harms no neighbour."""
        rows = self._claim(self._named, self._naming([(id, version)], ANY_LAPSES))
        return rows[0] if rows else None

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> list[DelayTask]:
        """The oldest due rows of the highest priority: the slow path, which needs no message."""
        claimed: list[DelayTask] = []
        for priority in sorted(priorities, reverse=True):
            claimed += self._claim_level(queue, priority, limit - len(claimed))
            if len(claimed) >= limit:
                break
        return claimed

    def _claim_level(self, queue: str, priority: int, limit: int) -> list[DelayTask]:
        def claim(since: datetime, most: int) -> list[DelayTask]:
            level = {"due_queue": queue, "due_priority": priority}
            return self._claim(self._due, {**level, "due_since": since, "due_limit": most})

        if self.lines.limited():  # which holds some of what it finds
            return claim(BEGINNING, limit)
        since = self._backlog.since(queue, priority)
        claimed = claim(since, limit)
        if since > BEGINNING and len(claimed) < limit:
            claimed = [*claim(BEGINNING, limit - len(claimed)), *claimed]
        self._backlog.reach(queue, priority, claimed, len(claimed) >= limit)
        return claimed

    def claim_suspect(self, queue: str, priorities: Sequence[int] = range(MAX_PRIORITY + 1)) -> DelayTask | None:
        """The due row that lapsed least and is oldest, of the highest priority. Each priority is asked for by itself:
        else the index would be walked through all rows that wait in the queue, however far in the future."""
        for priority in sorted(priorities, reverse=True):
            rows = self._claim(self._suspect, {"due_queue": queue, "due_priority": priority})
            if rows:
                return rows[0]
        return None

    def _naming(
        self, pairs: Sequence[tuple[int, int]], lapses: int, status: Status = Status.NOT_COMPLETE
    ) -> dict[str, Any]:
        pairs = sorted(pairs)
        rows = [{"id": id, "version": version, "status": int(status), "lapses": lapses} for id, version in pairs]
        parameters: dict[str, Any] = {"rows": dump_rows(rows)}
        if self._db.can.array_parameters:
            parameters |= self._listing([id for id, _ in pairs])
        return parameters

    def _pick(self, candidates: Select[Any], is_planned_once: bool = False) -> Pick:
        t = self._t
        candidates = candidates.with_for_update(skip_locked=True, of=t if self._db.can.update_returning else None)
        picked = candidates.cte("picked")
        mine: ColumnElement[bool] = t.c.id.in_(select(picked.c.id))
        if self._db.can.array_parameters:
            # A list that is made first: the planner can only look each id up.
            mine = t.c.id == any_(func.array(select(picked.c.id).scalar_subquery()))
            if is_planned_once:
                mine = and_(mine, self._is_within())
        taking = update(t).where(mine).values(self._claimed).returning(*self._columns)
        return Pick(*(Prepared(self._db, statement, is_planned_once) for statement in (candidates, taking)))

    def _is_listed(self) -> ColumnElement[bool]:
        """Without it a table that was never analysed is read from end to end."""
        return and_(self._t.c.id == any_(bindparam("ids", type_=ARRAY(BigInteger))), self._is_within())

    def _is_within(self) -> ColumnElement[bool]:
        """The range of the ids: a plan that is kept can tell by it, and not by a list, which partitions to open."""
        return self._t.c.id.between(bindparam("first", type_=BigInteger), bindparam("last", type_=BigInteger))

    def _listing(self, ids: list[int]) -> dict[str, Any]:
        """The parameters of a sorted list."""
        return {"ids": ids, "first": ids[0], "last": ids[-1]} if self._db.can.array_parameters else {"ids": ids}

    def _claim(self, pick: Pick, parameters: dict[str, Any]) -> list[DelayTask]:
        if self._db.can.update_returning and not self.lines.limited():
            rows = self._db.alone(lambda c: pick.take(c, parameters).rows)
        else:
            rows = self._db.run(lambda: self._claim_in_two(pick.candidates, parameters))
        return self._tasks(rows)

    def _claim_in_two(self, pick: Prepared, parameters: dict[str, Any]) -> Sequence[Any]:
        with self._db.begin() as connection:
            candidates = [Candidate(*row) for row in pick(connection, parameters).rows]
            return self._take(connection, self.lines.let_in(connection, candidates))

    def _take(self, on: Any, ids: Sequence[int]) -> Sequence[Any]:
        """Rows that this transaction has locked."""
        if not ids:
            return []
        if self._db.can.update_returning:
            return self._taking(on, self._listing(sorted(ids))).rows
        mine = self._t.c.id.in_(ids)
        on.execute(update(self._t).where(mine).values(self._claimed))
        return list(on.execute(select(*self._columns).where(mine)).all())

    def _take_held(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayTask]:
        """Those of these ids and versions that wait in line; what somebody has locked is passed over."""
        parameters = self._naming(pairs, ANY_LAPSES, Status.HELD)
        if self._db.can.update_returning:
            return self._tasks(self._named.take(on, parameters).rows)
        return self._tasks(self._take(on, [row[0] for row in self._named.candidates(on, parameters).rows]))

    def _tasks(self, rows: Iterable[Any]) -> list[DelayTask]:
        tasks = (task_of(row, self._shard) for row in rows)
        return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))

    def misses(self, ids: Iterable[int]) -> list[Miss]:
        t, wanted = self._t, list(ids)
        if not wanted:
            return []
        query = select(t.c.id, t.c.version, t.c.status, t.c.expected_time, t.c.lapses).where(t.c.id.in_(wanted))
        rows = self._db.alone(lambda c: c.execute(query).all())
        return [Miss(row[0], row[1], Status.of(row[2]), to_us(row[3]), row[4]) for row in rows]

    # -- settle -----------------------------------------------------------------------------------

    def _settle_statement(self) -> Update:
        t = self._t
        names = ("id", "version", "was", "status", "error", "result", "began", "due", "returned", "never_ran")
        w = json_rows(self._dialect, names)
        statement = (
            update(t)
            .where(t.c.id == w.c.id, t.c.version == w.c.version, t.c.status == w.c.was)
            .values(
                status=w.c.status,
                version=next_version(t.c.version),
                error_stack=w.c.error,
                result=w.c.result,
                # Given back, it never ran: nobody did, anywhere.
                execution_time=case((w.c.never_ran == 1, None), else_=func.coalesce(w.c.began, t.c.execution_time)),
                worker=case((w.c.never_ran == 1, None), else_=t.c.worker),
                ip_address=case((w.c.never_ran == 1, None), else_=t.c.ip_address),
                expected_time=func.coalesce(w.c.due, t.c.expected_time),
                attempts=t.c.attempts - w.c.returned,
                lapses=case((w.c.never_ran == 1, t.c.lapses), else_=0),
                lease_until=None,
                update_time=db_now(),
            )
        )
        if self._db.can.array_parameters:
            return statement.where(self._is_listed())
        # Else MySQL reads a small table from end to end, and waits for each row in it that somebody has locked.
        return statement.where(t.c.id.in_(bindparam("ids", expanding=True)))

    def settle(self, settlements: Sequence[Settlement]) -> set[int]:
        """The ids whose end was accepted; the others were no longer ours."""
        accepted: set[int] = set()
        for part in _parts(settlements):
            accepted |= self._settle_part(part)
        return accepted

    def hand_over(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayTask]]:
        """Settles them, and their places go to the next ones in line. That is one step: as many run as before, whoever
        counts them meanwhile, so nobody needs to count here."""

        def work() -> tuple[set[int], Sequence[DelayTask]]:
            with self._db.begin() as connection:
                parts = [self._settle_together(connection, part) for part in _parts(settlements)]
                accepted = set().union(*parts)
                return accepted, self.lines.next(connection, queue, tag, len(accepted))

        return self._db.run(work)

    def complete(self, task: DelayTask, result: str | None, on: Executor) -> bool:
        """The end of a task that runs, as a part of its processor's own transaction; False if it was taken from it."""
        t, move = self._t, MOVES["succeed"]
        self._keys.release(on, task)  # keys before tasks
        done = {
            "status": int(move.target),
            "version": following(task.version),
            "error_stack": None,
            "result": result,
            "lapses": 0,
            "lease_until": None,
            "update_time": db_now(),
        }
        is_ours = and_(t.c.id == task.id, t.c.version == task.version, t.c.status.in_([int(s) for s in move.sources]))
        return bool(on.execute(update(t).where(is_ours).values(**done)).rowcount)

    def _settle_part(self, ordered: Sequence[Settlement]) -> set[int]:
        if not any(s.move in MISSES or (s.task.key is not None and s.move != "give_back") for s in ordered):
            return self._db.alone(lambda c: self._settled(c, ordered))

        def together() -> set[int]:
            with self._db.begin() as connection:
                return self._settle_together(connection, ordered)

        return self._db.run(together)

    def _settle_together(self, on: Any, ordered: Sequence[Settlement]) -> set[int]:
        # Keys before tasks, as those who replace a task do it: the other way round they would deadlock.
        held = self._lock_keys(on, ordered)
        settlements = [self._unless_replaced(s, held) for s in ordered]
        accepted = self._settled(on, settlements)
        over = [s for s in settlements if s.task.id in accepted]
        self._keys.release_all(on, [_named(s) for s in over if s.task.id in held and MOVES[s.move].target in FINISHED])
        if failed := [s for s in over if s.move in MISSES]:
            self._attempts.record(on, failed, self._worker)
        return accepted

    def _lock_keys(self, on: Any, settlements: Sequence[Settlement]) -> set[int]:
        """The ids of those that still have their key."""
        named = [_named(s) for s in settlements if s.task.key is not None and s.move != "give_back"]
        return {row[0] for row in self._keys.lock_all(on, named, skip_locked=False)}

    @staticmethod
    def _unless_replaced(settlement: Settlement, held: set[int]) -> Settlement:
        """A task whose key went to another one while it ran may finish, but not run again."""
        task, again = settlement.task, settlement.move in ("climb", "snooze")
        if not again or task.key is None or task.id in held:
            return settlement
        error = f"{settlement.error or settlement.move}\nNot run again: its key {task.key!r} went to another task."
        return replace(settlement, move="fail", error=error, due=None)

    def _settled_row(self, settlement: Settlement) -> dict[str, Any]:
        return {
            "id": settlement.task.id,
            "version": settlement.task.version,
            "was": int(Status.RUNNING),
            "status": int(MOVES[settlement.move].target),
            "error": settlement.error,
            "began": instant_text(self._dialect, settlement.began),
            "due": instant_text(self._dialect, settlement.due),
            "result": settlement.result,
            "returned": int(settlement.move in RETURNS_ATTEMPT),
            "never_ran": int(settlement.move in NEVER_RAN),
        }

    def _settled(self, connection: Any, ordered: Sequence[Settlement]) -> set[int]:
        parameters = {"rows": dump_rows([self._settled_row(s) for s in ordered])}
        parameters |= self._listing([s.task.id for s in ordered])
        expected = {s.task.id: self._after(s) for s in ordered}
        if self._settle(connection, parameters).met == len(ordered):
            return set(expected)
        # Some were not ours any more, or the same settlement came through before its answer was lost.
        t = self._t
        query = select(t.c.id, t.c.version, t.c.status, t.c.lapses).where(t.c.id.in_(list(expected)))
        return {row[0] for row in connection.execute(query) if tuple(row[1:]) == expected[row[0]]}

    @staticmethod
    def _after(settlement: Settlement) -> tuple[int, int, int]:
        """Version, status and lapses of a row that this settlement left; a lapse leaves other ones."""
        task, never_ran = settlement.task, settlement.move in NEVER_RAN
        return following(task.version), int(MOVES[settlement.move].target), task.lapses if never_ran else 0


def _named(settlement: Settlement) -> tuple[int, str, str | None]:
    return settlement.task.id, settlement.task.tag, settlement.task.key


def _parts(settlements: Sequence[Settlement]) -> Iterator[list[Settlement]]:
    """In the order of their ids."""
    part: list[Settlement] = []
    size = 0
    for settlement in sorted(settlements, key=lambda settlement: settlement.task.id):
        length = len(settlement.error.encode(errors="replace")) if settlement.error else 0
        if part and size + length > MAX_TEXT:
            yield part
            part, size = [], 0
        part.append(settlement)
        size += length
    if part:
        yield part
