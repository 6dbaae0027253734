"""Invalid input is refused by every call, on every database."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayTasks, NewTask, Status
from delaytasks.model.inputs import MAX_DELAY_S
from tests.conformance.test_transactions import every_call
from tests.fuzzing import fuzz, json_like
from tests.refusals import raised
from tests.world import MakeWorld, World

UTC = timezone.utc
FAR_EAST, DAY = timezone(timedelta(hours=14)), timedelta(days=1)
NAIVE, THEN = datetime(2030, 1, 1), datetime(2030, 1, 1, tzinfo=UTC)
UNSTORABLE = ["a\x00b", "\x00", "\ud800", "x\udfff", "\udc00\ud800"]
SQL = "x'; DROP TABLE s_yb_delay_task_message; -- %s %(a)s :id \\ \" ?"


def traces(world: World) -> tuple[int, ...]:
    """Return the number of rows of each table and the number of messages sent."""
    tables = world.table().metadata.sorted_tables
    counts = [select(func.count()).select_from(table).scalar_subquery() for table in tables]
    [rows] = world.rows(select(*counts))
    return (*rows, len(world.broker.armed))


@contextmanager
def refuses(world: World, error: type[e.DelayTaskError] | str, *words: str) -> Iterator[None]:
    """Expect an error, or the error that an argument is invalid, and no side effects."""
    kind = e.InvalidInputError if isinstance(error, str) else error
    before = traces(world)
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert kind is error or getattr(caught.value, "argument", None) == error
    assert [word for word in words if word not in str(caught.value)] == []
    assert traces(world) == before, "something was half done"


class Unsayable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class TwoFaced(list):  # type: ignore[type-arg]
    """A body that changes while it is written."""

    def __iter__(self) -> Iterator[Any]:
        face, self.face = getattr(self, "face", 1), nested(100_000)
        return iter([face])


# Invalid arguments


def nested(depth: int) -> list[Any]:
    body: list[Any] = []
    for _ in range(depth - 1):
        body = [body]
    return body


def cycle() -> dict[str, Any]:
    body: dict[str, Any] = {"a": []}
    body["a"].append(body)
    return body


def doubled() -> list[Any]:
    """Return a small body with one part very many times."""
    body: list[Any] = ["x"]
    for _ in range(90):
        body = [body, body]
    return body


#: Bodies that JSON or a database cannot represent, by the path of the bad value.
BAD_BODIES: dict[str, list[Any]] = {
    "$": [{1, 2}, float("inf"), {None: 2}, Unsayable(), range(3)],
    "$[0]": [nested(101), nested(100_000), [THEN], [uuid.uuid4()]],
    "$[1]": [[0.5, float("nan")]],
    "$.a": [{"a": value} for value in ({1: 2}, Decimal("1.5"), print, float("nan"), b"x")],
    "$.a[0]": [cycle(), {"a": [10**5000]}],
    "$.a[1]": [{"a": [1, b"x"]}, {"a": ({}, {True: 1})}],
    "": [doubled(), TwoFaced([1])],
}
BAD_BODIES["$"] += [body for bad in UNSTORABLE for body in (bad, [bad], {"a": bad}, {bad: 1})]
BAD_NAMES = [
    "", " ", "\t", "a\nb", "a\r\nb", "\x1b[31mred", "a\x7f", "\u202e", "\u2028",
    5, b"mail", ["mail"], *UNSTORABLE,
]  # fmt: skip
BAD_QUEUES = ["a b", "../../etc/passwd", "a/b", "😀" * 90, "q*", "q#", "a:b", "x" * 101]
BAD_IDS = [
    0, -1, 2**63, 2**64, 10**5000, "9" * 5000, True, "1 OR 1=1", "", "-1", "1.0", "٣", 1.0, b"1",
    Unsayable(),
]  # fmt: skip
BAD_CURSORS = ["", "x", "====", "MTIz", "YTpi", "😀", "\ud800", "MTox\n;", 5, b"MTox", ["x"]]
BAD_CURSORS += ["nonsense", "AAAA", "ОК"]
#: These cursors are well formed, but no row has their numbers: 10^30:1, 1:10^30, 1:-10^30.
BAD_CURSORS += ["MTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDox"]
BAD_CURSORS += ["MToxMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw"]
BAD_CURSORS += ["MTotMTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMA=="]
BAD_DELAYS = [
    -1, -0.001, float("nan"), float("inf"), float("-inf"), True, 1e20, 10**400, -(10**5000),
    Decimal(5), timedelta(seconds=-1), timedelta.max, [5], Unsayable(),
]  # fmt: skip
BAD_LIMITS = [0, -1, True, 1.5, "5", 10**10]
BAD_INSTANTS = [NAIVE, "2030-01-01T00:00:00Z", 1893456000, object()]
BAD_INSTANTS += [datetime(1, 1, 1, tzinfo=FAR_EAST), datetime.max.replace(tzinfo=UTC)]
BAD: dict[str, list[Any]] = {
    "tag": [*BAD_NAMES, "x" * 129],
    "key": [*BAD_NAMES, "x" * 192],
    "queue": BAD_NAMES + BAD_QUEUES,
    "id": BAD_IDS,
    "task": BAD_IDS,
    "delay": [*BAD_DELAYS, "5"],
    "at": BAD_INSTANTS,
    "since": [NAIVE],
    "until": ["soon", -5, True, NAIVE],
    "jitter": [*BAD_DELAYS, 0, "0s", "soon"],  # but the text "5" means 5 seconds
    "priority": [-1, 10, True, 1.0, "1", None, 10**5000, Unsayable()],
    "limit_key": ["", " ", "a ", "a" * 256, "a\nb", 7, True],
    "on_conflict": ["Reject", "ignore", "", None, 1, [], Unsayable()],
    "item": [None, "mail", ("mail", {}), ("mail", {}, 1, 2), ["mail", {}, 1], Unsayable()],
    "limit": [-1, 0, 1001, 10**9, 10**5000, True, 1.0, "10", None, Unsayable()],
    "status": [77, -1, True, "GONE", "", 1.5, Unsayable()],
    "cursor": BAD_CURSORS,
    "version": [1, -1, 2**70, 10**5000, "0", Unsayable()],
    "concurrency": BAD_LIMITS,
    "concurrency_per_key": BAD_LIMITS,
    "rate": [*"100 0/s /s 5/ 5/0s 5/99d -5/s 5/x ٣/s 5/s/s".split(), 5, "9" * 99 + "/s"],
    "actor": ["x" * 256, "a\nb"],
    "by": [0, "-5", True, float("-inf"), -1e12],
    "before": ["x", 0, 2**63],
    "name": [*BAD_NAMES, "x" * 167],
    "every": [0, 1.5, -5, "5 parsecs"],
    "cron": ["61 * * * *", "0 0 31 2 *", "* * *", "* " * 400, object()],
    "tz": ["Mars/Olympus", "../etc/passwd"],
    "missed": ["maybe"],
    "overlap": ["maybe"],
    "meta": ["tenant", {"": "a"}, {"a b": "c"}, {"a": 1}, {1: "a"}, {"a": "x" * 513}],
    "ids": [[], b"12", {7: "first"}, range(1, 1002), ["7", "seven"], [0], True, "1,2"],
    "error": ["", "*", "**", 5, "x" * 1001, "a\0b"],
    "body_version": [0, "2", True, 1.0],
    "processes": [0, True, 2.5],
    "days": [0, "7", float("nan"), 10_000],
    "start": [NAIVE],
}
BAD["meta"] += [{str(n): "x" for n in range(17)}, {str(n): "x" * 512 for n in range(9)}]
#: The errors of some arguments, and words of them.
ERRORS: dict[str, Any] = {"task": "id", "item": "tasks", "version": e.StaleVersionError}
SAYS = {"limit": "1 to 1000", "status": "NOT_COMPLETE", "version": "version 0, not"}

#: The ids of a task that waits and has the key `k`, and of one that has failed.
WAITS, FAILED = 41, 42
OPTIONS: dict[str, Any] = {"tag": "mail", "body": {}, "delay": 5, "key": "new", "queue": "q"}
OPTIONS |= {"priority": 0, "id": 5, "limit_key": "k", "jitter": 5, "on_conflict": "replace"}
OPTIONS |= {"meta": {}, "body_version": 1}
LIMITS = {"concurrency": 1, "concurrency_per_key": 1, "rate": "5/s"}
RECURRING: dict[str, Any] = {"name": "r", "every": 5, "missed": "all", "overlap": "skip"}
RECURRING |= {"start": THEN, "meta": {}, "priority": 0}
FILTERS = {"tag": "a", "key": "k", "queue": "q", "status": "DONE", "since": THEN, "until": THEN}
FILTERS |= {"ids": [1], "error": "no*"}


def schedule_many(d: DelayTasks, on_conflict: Any = "reject", **task: Any) -> object:
    return d.schedule_many([("mail", {}, 5), NewTask(**task)], on_conflict=on_conflict)


#: The calls, with arguments that they accept.
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "schedule": (DelayTasks.schedule_delay, OPTIONS),
    "schedule at": (DelayTasks.schedule_delay, {"tag": "mail", "body": {}, "at": THEN}),
    "batch": (schedule_many, OPTIONS),
    "batch item": (
        lambda d, item: d.schedule_many([("mail", {}, 5), item]),
        {"item": ("a", {}, 5)},
    ),
    "processor": (DelayTasks.processor, {"tag": "mail", "queue": "q", "body_version": 1}),
    "get": (DelayTasks.get, {"task": WAITS}),
    "cancel": (lambda d, **of: raised(d.cancel(**of)), {"task": WAITS, "version": 0}),
    "cancel by key": (lambda d, **of: raised(d.cancel(**of)), {"tag": "mail", "key": "k"}),
    "reschedule": (DelayTasks.reschedule, {"task": WAITS, "delay": 5, "version": 0}),
    "touch": (DelayTasks.touch, {"task": WAITS, "delay": 5}),
    "touch ids": (lambda d, task, delay: d.touch([WAITS, task], delay), {"task": 1, "delay": 5}),
    "rerun": (DelayTasks.rerun, {"task": FAILED, "delay": 5, "version": 0}),
    "find": (DelayTasks.find, FILTERS | {"cursor": None, "limit": 10}),
    "bulk spread": (lambda d, jitter: d.bulk.reschedule(jitter=jitter, tag="mail"), {"jitter": 5}),
    "bulk shift": (lambda d, by: d.bulk.reschedule(by=by, tag="mail"), {"by": 5}),
    "bulk cancel": (lambda d, **of: d.bulk.cancel(**of), {"tag": "mail", "ids": [1], "actor": "a"}),
    "bulk rerun": (lambda d, delay, ids: d.bulk.rerun(delay, ids=ids), {"delay": 5, "ids": [1]}),
    "forecast": (DelayTasks.forecast, {"days": 1, "processes": 1}),
    "log": (lambda d, **of: d.bulk.log(**of), {"limit": 1, "before": 5}),
    "pause a tag": (lambda d, **of: d.policies.pause(**of), {"tag": "mail", "until": "2h"}),
    "pause a queue": (lambda d, queue: d.policies.pause(queue=queue), {"queue": "q"}),
    "resume": (lambda d, tag: d.policies.resume(tag=tag), {"tag": "mail"}),
    "limit": (lambda d, **of: d.policies.set(tag="mail", **of), LIMITS),
    "recur": (lambda d, **of: d.recurring.set(tag="mail", **of), RECURRING),
    "recur by cron": (
        lambda d, **of: d.recurring.set("r", "mail", **of),
        {"cron": "* * * * *", "tz": "UTC"},
    ),
}
ARGUMENTS = [(name, each) for name, (_, good) in CALLS.items() for each in good if each in BAD]


@pytest.fixture
def two(world: World) -> Iterator[None]:
    """The two tasks of `CALLS`, which no refused call changes."""
    waits = world.schedule("mail", delay=60, id=WAITS, key="k")
    before = [world.read(task) for task in (waits, world.put(Status.FAILED, id=FAILED))]
    yield
    assert [world.read(task) for task in before] == before


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_invalid_argument_is_refused_by_every_call(
    world: World, name: str, argument: str
) -> None:
    call, good = CALLS[name]
    for value in BAD[argument]:
        with refuses(world, ERRORS.get(argument, argument), SAYS.get(argument, "")):
            call(world.delays, **good | {argument: value})


@pytest.mark.parametrize("path", BAD_BODIES)
def test_a_body_that_is_no_json_is_refused_with_the_path(world: World, path: str) -> None:
    for body in BAD_BODIES[path]:
        for call in (DelayTasks.schedule_delay, schedule_many):
            for key in (None, "k"):
                with refuses(world, "body", path):
                    call(world.delays, tag="mail", body=body, delay=5, key=key)


TWICE_NAMED = {"task": WAITS, "tag": "mail", "key": "k"}
#: Arguments that do not go together, and what the errors say.
REFUSED: list[tuple[str, Callable[[Any], object], str]] = [
    ("tag", lambda d: d.schedule_delay(None, {}, 5), ""),
    ("tag", lambda d: d.processor(None), ""),
    ("delay", lambda d: d.schedule_delay("mail", {}, MAX_DELAY_S + 0.001), "at most 522w6d"),
    ("jitter", lambda d: d.schedule_delay("mail", {}, MAX_DELAY_S, jitter=MAX_DELAY_S), "522w6d"),
    ("key", lambda d: d.schedule_delay("mail", {}, 5, jitter=5, key=Unsayable()), ""),
    ("delay", lambda d: d.schedule_delay("mail", {}, 5, at=THEN), ""),
    ("delay", lambda d: d.reschedule(WAITS), ""),
    ("at", lambda d: d.schedule_many([("mail", {}, NAIVE)]), "2030"),
    ("delay", lambda d: d.bulk.reschedule(60, jitter=60, tag="mail"), "jitter"),
    ("status", lambda d: d.find(status=[]), "name 1 to 1,000"),
    ("step", lambda d: d.statistics.series(step="90s"), "whole minutes"),
    ("step", lambda d: d.statistics.series(since=THEN - 9 * DAY, until=THEN), "longer step"),
    ("since", lambda d: d.statistics.series(since=THEN, until=THEN), "empty"),
    ("since", lambda d: d.statistics.series(since="3d"), "two days"),
    ("tags", lambda d: d.statistics.series(tags="mail"), "list"),
    ("everything", lambda d: d.bulk.cancel(), "everything=True"),
    ("colour", lambda d: d.bulk.cancel(colour="red"), "known: "),
    ("status", lambda d: d.bulk.cancel(status="DONE"), "HELD, NOT_COMPLETE, not DONE"),
    ("status", lambda d: d.bulk.rerun(status="RUNNING"), "CANCELLED, FAILED, not RUNNING"),
    ("delay", lambda d: d.bulk.reschedule(tag="a"), "one of the four"),
    ("until", lambda d: d.policies.pause(tag="a", until="0s"), "is over"),
    ("until", lambda d: d.policies.pause(tag="a", until=datetime(2026, 1, 1, tzinfo=UTC)), "'2h'"),
    ("tag", lambda d: d.policies.resume(tag="a", queue="b"), "a tag or a queue"),
    ("concurrency", lambda d: d.policies.set(tag="a"), "what"),
    ("queue", lambda d: d.policies.set(queue="slow", concurrency=3), "limits are for tags"),
    ("tag", lambda d: d.recurring.set("r", "", every=5), ""),
    ("cron", lambda d: d.recurring.set("r", "mail", cron="* * * * *", every=5), ""),
    ("jitter", lambda d: d.recurring.set("r", "mail", every=5, jitter=-1), ""),
]
NOT_NAMED: list[dict[str, Any]] = [{}, {"key": "k"}, {"tag": "mail"}, TWICE_NAMED]
NOT_NAMED += [{"key": ["k"]}, {"task": [WAITS], "tag": "mail"}, TWICE_NAMED | {"key": ["k"]}]


@pytest.mark.usefixtures("two")
def test_arguments_that_do_not_go_together_are_refused(world: World) -> None:
    for argument, call, says in REFUSED:
        with refuses(world, argument, says):
            call(world.delays)
    for names in NOT_NAMED:
        with refuses(world, "task"):
            world.delays.touch(delay=500, **names)
    for names in NOT_NAMED[:4]:
        with refuses(world, "task"):
            world.delays.cancel(**names)
    with refuses(world, e.DuplicateTaskError):
        world.delays.schedule_many(NewTask("mail", {}, 5, key=key) for key in (None, "l", "k"))
    for name in ("get", "cancel", "reschedule", "touch", "rerun"):
        for id in (1, 2**63 - 1, "4711"):
            verb, good = CALLS[name]
            with refuses(world, e.TaskNotFoundError, str(id)):
                verb(world.delays, **good | {"task": id})


def test_a_closed_session_or_connection_is_refused(world: World) -> None:
    closed = Session(world.engine, close_resets_only=False)
    closed.close()
    connection = world.engine.connect()
    connection.close()
    task, failed, d = world.put(due_s=60), world.put(Status.FAILED), world.delays
    for session in [closed, connection, Session(), "x", object(), 5, Session]:
        calls = every_call(d, task, failed, session)
        calls += [partial(d.get, task, session=session), partial(d.find, session=session)]
        calls.append(partial(d.touch, tag="mail", key=["k"], delay=500, session=session))
        for call in calls:
            with refuses(world, e.SessionUnusableError):
                call()


SEND, SENT = "mail.send", "mail.sent"
#: The setting, the tags of processors, and the tags that calls accept.
KNOWN: list[tuple[Any, ...]] = [("auto", [], [SEND, SENT]), ("auto", [SEND], [SEND])]
KNOWN += [([SENT], [], [SENT]), ([SENT], [SEND], [SEND, SENT]), ("any", [SEND], [SEND, SENT])]


@pytest.mark.parametrize(("tags", "processors", "accepted"), [*KNOWN, ([], [], [])])
def test_the_setting_tags_decides_about_tags_without_a_processor(
    make_world: MakeWorld, tags: Any, processors: list[str], accepted: list[str]
) -> None:
    world = make_world(tags=tags)
    world.runtime.registry._processors.clear()
    for tag in processors:
        world.delays.processor(tag)(lambda body: None)
    for tag in accepted:
        world.schedule(tag)
    for tag in {SEND, SENT} - {*accepted}:
        hint = "did you mean 'mail.sen" if accepted else ""
        for call in (world.schedule, lambda tag: world.delays.schedule_many([(tag, {}, 5)])):
            with refuses(world, e.UnknownTagError, tag, hint):
                call(tag)


# What is accepted


ODD: list[Any] = [1e308, -1e308, 5e-324, -0.0, 2**53 + 1, 2**63, "😀", "\u2028", "\x7f\x01"]
ODD += [{"": [[[]]], "a": {}}, nested(99), -(2**53) - 1, 2**64 + 1, -(10**40), 10**4000]


def same(left: Any, right: Any) -> bool:
    """Compare by `repr()`, because == treats 1, 1.0 and True as equal, and 0.0 and -0.0 too."""
    return repr(left) == repr(right)


def test_extreme_bodies_come_back_exactly(world: World) -> None:
    for body in (ODD, {"": 2**64 + 1}, {"é\u2028": -0.0, "😀": "\x7f", "\\": None}):
        found = world.read(world.schedule(body=body, delay=60))
        assert same(found.body, body)
        assert same(found.as_json()["body"], body)


def test_a_body_is_measured_in_bytes(make_world: MakeWorld) -> None:
    world = make_world(max_body_bytes=1000)
    for body in ("a" * 998, "é" * 499, "😀" * 249 + "aa"):
        assert world.read(world.schedule(body=body, delay=60)).body == body
        with refuses(world, "body", "1,000 bytes"):
            world.schedule(body=body + "b", delay=60)


def test_sql_in_tag_key_and_body_is_stored_literally(world: World) -> None:
    ran: list[Any] = []
    world.delays.processor(SQL)(ran.append)
    task = world.schedule(SQL, {SQL: SQL}, key=SQL)
    assert world.delays.schedule_many([(SQL, SQL, 60)] * 3) == 3
    assert len(world.delays.find(tag=SQL)) == 4
    assert world.delays.get(tag=SQL, key=SQL) == world.read(task)
    assert (task.tag, task.key) == (SQL, SQL)
    world.run(task)
    assert ran == [{SQL: SQL}]
    assert not world.delays.find(tag="' OR '1'='1").tasks


def test_values_at_their_limits_are_accepted(world: World) -> None:
    tag, key, queue = "😀" * 128, "ü" * 191, "q" * 100
    task = world.schedule(tag, key=key, queue=queue, delay=MAX_DELAY_S)
    found = world.delays.get(tag=tag, key=key)
    assert (found.id, found.tag, found.key, found.queue) == (task.id, tag, key, queue)
    for instant in [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]:
        assert len(world.delays.find(since=instant)) + len(world.delays.find(until=instant)) == 1


def test_scheduling_the_same_id_again_changes_nothing_and_arms_the_task_again(world: World) -> None:
    first = world.schedule(body=1, delay=5, id=4711)
    again = world.schedule(body=2, delay=60, id=4711)
    assert (again.id, again.body, again.expected_time) == (4711, 1, first.expected_time)
    # A caller repeats an id if the result of the first call is unknown, so the row may not be
    # armed.
    assert world.broker.ids == [4711, 4711]
    world.cancel(4711)
    world.schedule(body=2, id=4711)
    assert world.broker.ids == [4711, 4711]
    assert world.read(4711).status is Status.CANCELLED


Name = enum.Enum("Name", {"MAIL": "mail", "KEY": "the key"}, type=str)
Level = enum.Enum("Level", {"HIGH": 9, "ID": 4711}, type=int)


def test_an_enum_member_is_stored_as_its_value(world: World) -> None:
    body = {"level": Level.HIGH, "name": Name.KEY}
    options: Any = {"key": Name.KEY, "priority": Level.HIGH, "id": Level.ID}
    task = world.delays.schedule_delay(Name.MAIL, body, 60, **options)
    # The values must have plain types. A driver may write a subclass by its `str()`, "Name.MAIL".
    assert same((task.tag, task.key, task.priority, task.id), ("mail", "the key", 9, 4711))
    assert task.body == {"level": 9, "name": "the key"}
    for found in (world.delays.get(tag="mail", key="the key"), world.delays.get(Level.ID)):
        assert [found] == world.delays.find(tag=Name.MAIL).tasks
        assert (found.id, found.priority, found.body) == (task.id, task.priority, task.body)


def test_a_processor_computes_the_limit_key_unless_the_call_names_one(world: World) -> None:
    world.delays.processor("pay", limit_key=lambda body: body["customer"])(lambda body: None)
    schedule = world.delays.schedule_delay
    own = schedule("pay", {"customer": "c7"}, 5, limit_key="own")
    tasks = [own, *(schedule("pay", {"customer": customer}, 5) for customer in ("c7", None))]
    assert [world.read(task).limit_key for task in tasks] == ["own", "c7", None]
    with refuses(world, "limit_key"):
        schedule("pay", {"customer": 7}, 5)


def test_the_past_is_accepted_and_runs_now(world: World) -> None:
    years = [1, 1500, 1969, 2001]
    for year in years:
        then = datetime(year, 1, 1, tzinfo=UTC)
        task = world.delays.schedule_delay("note", year, at=then)
        assert abs(world.read(task).expected_time - world.now()) < timedelta(seconds=5)
        world.delays.reschedule(task, at=then)
        assert world.broker.ids[-2:] == [task.id] * 2
        world.worker().run_entries(world.broker.armed[-1:])
    assert world.notes == years


# Random bodies and arguments


anything = st.one_of(
    *(json_like, st.integers(), st.floats(), st.text(), st.sampled_from(UNSTORABLE)),
    *(st.binary(), st.sets(st.integers(), min_size=1), st.complex_numbers(), st.decimals()),
    *(st.timedeltas(), st.uuids(), st.functions(), st.builds(object), st.builds(Unsayable)),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.dictionaries(st.integers() | st.none() | st.tuples(), json_like, min_size=1),
)


@pytest.mark.slow
@fuzz(60)
@given(name=st.sampled_from(sorted(CALLS)), data=st.data())
def test_any_arguments_give_a_task_or_our_error(
    world: World, name: str, data: st.DataObject
) -> None:
    call, good = CALLS[name]
    changed = data.draw(st.sets(st.sampled_from(sorted(good)), min_size=1))
    before = traces(world)
    try:
        call(world.delays, **good | {name: data.draw(anything) for name in sorted(changed)})
    except e.DelayTaskError:
        assert traces(world) == before
