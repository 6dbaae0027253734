"""Rows as workers see them: claimed, one statement for many rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    any_,
    bindparam,
    func,
    literal,
    select,
    tuple_,
    update,
)

from delaytasks.core.clock import to_us
from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.jsontext import dump_json
from delaytasks.core.ports import Entry, Executor, Miss, Settlement
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.store.backlog import Backlog
from delaytasks.store.database import Database
from delaytasks.store.handover import Handover
from delaytasks.store.lines import Candidate, Limited, Lines
from delaytasks.store.prepared import Prepared
from delaytasks.store.rows import (
    CLAIMED,
    MOST,
    by_id,
    columns,
    each_listed,
    json_rows,
    list_of,
    next_version,
    one_more,
    shared_name,
    shared_parameter,
    task_of,
    within_list,
)
from delaytasks.store.schema import Schema
from delaytasks.store.settlements import Settlements
from delaytasks.store.types import UTCDateTime, db_now, db_now_plus, earliest, is_past, once

#: More than any row has.
ANY_LAPSES = MOST


class Pick(NamedTuple):
    """A way to choose rows: the candidates alone, and the statement that chooses, takes and returns them at once, or
    where there is none locks them as a whole."""

    candidates: Prepared
    take: Prepared


class Claims:
    """Claims for one worker process, whose name and address its rows carry."""

    def __init__(
        self, database: Database, schema: Schema, worker: str, ip: int | None, lease_s: float, limited: Limited
    ) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._schema = schema
        self._columns = columns(schema, CLAIMED)
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
        taking = update(t).where(each_listed(database, t.c.id)).values(self._claimed)
        self._taking = Prepared(database, taking.returning(*self._columns))
        self._candidate = candidate = columns(schema, Candidate._fields)
        self._named = self._pick(self._by_rows(), is_planned_once=True)
        #: For rows whose versions are the same.
        self._listed = self._pick(self._by_list(), is_planned_once=True) if database.can.looks_up_lists else None
        status: ColumnElement[int] = literal(int(Status.NOT_COMPLETE))
        queue, priority = bindparam("due_queue", type_=String), bindparam("due_priority", type_=Integer)
        waiting = and_(t.c.status == status, t.c.queue == queue, t.c.priority == priority)

        def due(since: ColumnElement[datetime] | None) -> ColumnElement[bool]:
            until = once(db_now())
            if database.can.row_ranges:
                # A range that only the index of live rows knows. In the other one all that ran before comes first.
                level = tuple_(t.c.status, t.c.queue, t.c.priority, t.c.expected_time)
                first = earliest() if since is None else since
                return and_(
                    level >= tuple_(status, queue, priority, first), level <= tuple_(status, queue, priority, until)
                )
            return t.c.expected_time <= until if since is None else t.c.expected_time.between(since, until)

        # Planned each time: how many of them to expect is to be known, not guessed.
        self._due, self._due_since = (
            self._pick(
                select(*candidate)
                .where(waiting, due(since), t.c.lapses <= 0)
                .order_by(t.c.expected_time)
                .limit(bindparam("due_limit"))
            )
            for since in (None, bindparam("due_since", type_=UTCDateTime()))
        )
        self._suspect = self._pick(
            select(*candidate)
            .where(waiting, is_past(t.c.expected_time, db_now()), t.c.lapses > 0)
            # By lapses first, also because in the order of time alone MySQL would walk the index of all past rows.
            .order_by(t.c.lapses, t.c.expected_time)
            .limit(1)
        )
        self._backlog = Backlog()
        handover = Handover(database, schema, self._claimed, self._columns)
        self.ends = Settlements(database, schema, worker)
        self.lines = Lines(database, schema, self._take_held, handover, limited)

    # -- claim ------------------------------------------------------------------------------------

    def claim(self, entries: Sequence[Entry]) -> list[DelayTask]:
        """Those of the entries that are due, unchanged, and nobody else's. Rows that lapsed are left out."""
        if not entries:
            return []
        return self._claim(*self._naming([(entry.id, entry.version) for entry in entries], 0))

    def claim_alone(self, id: int, version: int) -> DelayTask | None:
        """One row, whether it lapsed before or not: a row that kills its worker harms no neighbour."""
        rows = self._claim(*self._naming([(id, version)], ANY_LAPSES))
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
        def claim(since: datetime | None, most: int) -> list[DelayTask]:
            level = {"due_queue": queue, "due_priority": priority, "due_limit": most}
            if since is None:
                return self._claim(self._due, level)
            return self._claim(self._due_since, {**level, "due_since": since})

        if self.lines.limited():  # which holds some of what it finds
            return claim(None, limit)
        since = self._backlog.since(queue, priority)
        claimed = claim(since, limit)
        if since is not None and len(claimed) < limit:
            claimed = [*claim(None, limit - len(claimed)), *claimed]
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
    ) -> tuple[Pick, dict[str, Any]]:
        pairs = sorted(set(pairs))  # a row that is named twice would be found twice
        ids, shared = [id for id, _ in pairs], {"status": int(status), "lapses": lapses}
        if self._listed is not None and len({version for _, version in pairs}) == 1:
            named = {**shared, "version": pairs[0][1]}
            return self._listed, list_of(self._db, ids) | {shared_name(name): named[name] for name in named}
        parameters: dict[str, Any] = {"rows": dump_json([{"id": id, "version": v, **shared} for id, v in pairs])}
        if self._db.can.array_parameters:
            parameters |= list_of(self._db, ids)
        return self._named, parameters

    def _by_rows(self) -> Select[Any]:
        t = self._t
        # All are columns there, though most are the same for all: of constants planners would expect one row, and
        # compare each with each.
        w = json_rows(self._db.url.get_backend_name(), ("id", "version", "status", "lapses"))
        pick = self._fenced(w.c.version, t.c.status == w.c.status, w.c.lapses).join(w, t.c.id == w.c.id)
        return pick.where(each_listed(self._db, t.c.id)) if self._db.can.array_parameters else pick

    def _by_list(self) -> Select[Any]:
        t, version, status, lapses = self._t, *map(shared_parameter, ("version", "status", "lapses"))
        # `+ 0`: the status must not be a way in, through an index of all rows that wait.
        pick = self._fenced(version, t.c.status + 0 == status, lapses)
        return by_id(pick.where(each_listed(self._db, t.c.id)), t)

    def _fenced(
        self, version: ColumnElement[int], has_status: ColumnElement[bool], lapses: ColumnElement[int]
    ) -> Select[Any]:
        t = self._t
        is_so = and_(t.c.version == version, has_status, t.c.lapses <= lapses)
        return select(*self._candidate).where(is_so, t.c.expected_time <= db_now()).order_by(t.c.id)

    def _pick(self, candidates: Select[Any], is_planned_once: bool = False) -> Pick:
        t = self._t
        candidates = candidates.with_for_update(skip_locked=True, of=t if self._db.can.update_returning else None)
        if not self._db.can.update_returning:
            whole = candidates.with_only_columns(*self._columns, maintain_column_froms=True)
            return Pick(Prepared(self._db, candidates), Prepared(self._db, whole))
        picked = candidates.cte("picked")
        mine: ColumnElement[bool] = t.c.id.in_(select(picked.c.id))
        if self._db.can.array_parameters:
            # A list that is made first: the planner can only look each id up.
            mine = t.c.id == any_(func.array(select(picked.c.id).scalar_subquery()))
            if is_planned_once:
                mine = and_(mine, within_list(t.c.id))
        taking = update(t).where(mine).values(self._claimed).returning(*self._columns)
        return Pick(*(Prepared(self._db, statement, is_planned_once) for statement in (candidates, taking)))

    def _claim(self, pick: Pick, parameters: dict[str, Any]) -> list[DelayTask]:
        if self.lines.limited():
            return self._tasks(self._db.run(lambda: self._claim_in_two(pick.candidates, parameters)))
        if self._db.can.update_returning:
            return self._tasks(self._db.alone(lambda c: pick.take(c, parameters).rows))
        return self._tasks(self._db.run(lambda: self._claim_locked(pick.take, parameters)), is_claimed=False)

    def _claim_locked(self, pick: Prepared, parameters: dict[str, Any]) -> Sequence[Any]:
        """The rows as they were before: nobody else could change them, so they need not be read again."""
        with self._db.begin() as connection:
            rows = pick(connection, parameters).rows
            if rows:
                self._mark(connection, [row[0] for row in rows])
            return rows

    def _claim_in_two(self, pick: Prepared, parameters: dict[str, Any]) -> Sequence[Any]:
        with self._db.begin() as connection:
            candidates = [Candidate(*row) for row in pick(connection, parameters).rows]
            return self._take(connection, self.lines.let_in(connection, candidates))

    def _take(self, on: Any, ids: Sequence[int]) -> Sequence[Any]:
        """Rows that this transaction has locked."""
        if not ids:
            return []
        if self._db.can.update_returning:
            return self._taking(on, list_of(self._db, sorted(ids))).rows
        self._mark(on, ids)
        return list(on.execute(select(*self._columns).where(self._t.c.id.in_(ids))).all())

    def _mark(self, on: Any, ids: Sequence[int]) -> None:
        on.execute(update(self._t).where(self._t.c.id.in_(ids)).values(self._claimed))

    def _take_held(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayTask]:
        """Those of these ids and versions that wait in line; what somebody has locked is passed over."""
        pick, parameters = self._naming(pairs, ANY_LAPSES, Status.HELD)
        if self._db.can.update_returning:
            return self._tasks(pick.take(on, parameters).rows)
        return self._tasks(self._take(on, [row[0] for row in pick.candidates(on, parameters).rows]))

    def _tasks(self, rows: Iterable[Any], is_claimed: bool = True) -> list[DelayTask]:
        tasks = [task_of(row, self._schema) for row in rows]
        if not is_claimed:
            for task in tasks:
                task.status, task.version = MOVES["claim"].target, following(task.version)
                task.attempts = min(task.attempts + 1, MOST)
        return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))

    def misses(self, ids: Iterable[int]) -> list[Miss]:
        t, wanted = self._t, list(ids)
        if not wanted:
            return []
        query = select(t.c.id, t.c.version, t.c.status, t.c.expected_time, t.c.lapses).where(t.c.id.in_(wanted))
        rows = self._db.alone(lambda c: c.execute(query).all())
        return [Miss(row[0], row[1], Status.of(row[2]), to_us(row[3]), row[4]) for row in rows]

    # -- settle -----------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement]) -> set[int]:
        """The ids whose end was accepted; the others were no longer ours."""
        return self.ends.settle(settlements)

    def complete(self, task: DelayTask, result: str | None, on: Executor) -> bool:
        """The end of a task that runs, as a part of its processor's own transaction; False if it was taken from it."""
        return self.ends.complete(task, result, on)

    def hand_over(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayTask]]:
        """Settles them, and their places go to the next ones in line. That is one step: as many run as before, whoever
        counts them meanwhile, so nobody needs to count here."""

        def work() -> tuple[set[int], Sequence[DelayTask]]:
            with self._db.begin() as connection:
                accepted = self.ends.settle_together(connection, settlements)
                return accepted, self.lines.next(connection, queue, tag, len(accepted))

        return self._db.run(work)
