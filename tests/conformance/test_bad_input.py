"""Invalid input is refused by every call, on every database."""

from __future__ import annotations

import contextlib
import enum
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, NewTask, Status
from delaytasks.model.inputs import MAX_DELAY_S
from tests.conftest import closing_all
from tests.fuzzing import fuzz, plain
from tests.refusals import raised
from tests.world import World, status_columns
from tests.world.recording import delays_on, record, runner_of

UTC = timezone.utc
FAR_EAST = timezone(timedelta(hours=14))
SECRET = "s3cr3t-canary"
SQL = "x'; DROP TABLE s_yb_delay_task_message; -- %s %(a)s :id \\ \" ?"


class Place:
    """A `DelayTasks` on empty tables that checks the side effects of refused calls."""

    def __init__(self, url: str, world: World, **changes: Any) -> None:
        self.delays = delays_on(url, table_prefix="s_", **changes)
        self.timer = record(self.delays)
        self.world = world

    def close(self) -> None:
        self.delays.close()

    def traces(self) -> tuple[int, ...]:
        """Return the number of rows of each table and the number of messages sent."""
        tables = self.world.table().metadata.sorted_tables
        counts = [select(func.count()).select_from(table).scalar_subquery() for table in tables]
        [rows] = self.world.rows(select(*counts))
        return (*rows, len(self.timer.armed))

    @contextlib.contextmanager
    def refuses(self, error: type[e.DelayTaskError] | str, *words: str) -> Iterator[None]:
        """Expect an error, or the error that an argument is invalid."""
        kind = e.InvalidInputError if isinstance(error, str) else error
        before = self.traces()
        with pytest.raises(kind) as caught:
            yield
        assert type(caught.value) is kind
        assert getattr(caught.value, "argument", None) == error or kind is error
        for word in words:
            assert word in str(caught.value)
        assert self.traces() == before, "something was half done"

    def refuse(
        self,
        error: type[e.DelayTaskError] | str,
        values: Sequence[Any],
        *calls: Callable[[Any], Any],
        says: str = "",
    ) -> None:
        """Expect that each of the calls refuses each of the values."""
        for value in values:
            for call in calls:
                with self.refuses(error, says):
                    call(value)

    def put(
        self, status: Status = Status.NOT_COMPLETE, delay: float = 60, **options: Any
    ) -> DelayedTask:
        task = self.delays.schedule_delay("mail", {"n": 1}, delay, **options)
        self.world.change(task, **status_columns(status))
        return task

    def insert(self, **values: Any) -> int:
        """Insert a row as another program would, and return its id."""
        with self.world.begin() as connection:
            row = {"tag": "mail", "message_body": "{}", **values}
            made = connection.execute(insert(self.world.table()).values(**row))
            key = made.inserted_primary_key
            assert key is not None
            return int(key[0])


class Unsayable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


UNSTORABLE = ["a\x00b", "\x00", "\ud800", "x\udfff", "\udc00\ud800"]
BAD_NAMES = [
    None, "", " ", "\t", "a\nb", "a\r\nb", "\x1b[31mred", "a\x7f", "\u202e", "\u2028",
    5, b"mail", ["mail"],
]  # fmt: skip


Make = Callable[..., Place]


@pytest.fixture
def make(world: World, database_url: str) -> Iterator[Callable[..., Place]]:
    with closing_all(partial(Place, database_url, world)) as make:
        yield make


@pytest.fixture
def place(make: Make) -> Place:
    return make()


# Bodies that JSON or a database cannot represent


def nested(depth: int) -> list[Any]:
    body: list[Any] = []
    for _ in range(depth - 1):
        body = [body]
    return body


def cycle() -> dict[str, Any]:
    body: dict[str, Any] = {"a": []}
    body["a"].append(body)
    return body


NOT_JSON = [
    ({1, 2}, "$"),
    ({"a": [1, b"x"]}, "$.a[1]"),
    ([0.5, float("nan")], "$[1]"),
    (float("inf"), "$"),
    ({"a": {1: 2}}, "$.a"),
    ({None: 2}, "$"),
    ({"a": ({}, {True: 1})}, "$.a[1]"),
    (cycle(), "$.a[0]"),
    (nested(101), "$[0]"),
    (nested(100_000), "$[0]"),
    ({"price": Decimal("1.5")}, "$.price"),
    ([datetime(2030, 1, 1, tzinfo=UTC)], "$[0]"),
    ([uuid.uuid4()], "$[0]"),
    ({"f": print}, "$.f"),
    (Unsayable(), "$"),
    ({"n": [10**5000]}, "$.n[0]"),
    (range(3), "$"),
]


def test_a_body_without_a_json_form_is_refused_with_the_path_of_the_bad_value(place: Place) -> None:
    d = place.delays
    for body, where in NOT_JSON:
        place.refuse(
            "body",
            [body],
            lambda body: d.schedule_delay("mail", body, 5),
            lambda body: d.schedule_many([("mail", {}, 5), ("mail", body, 5)]),
            lambda body: d.schedule_delay("mail", body, 5, key="k", on_conflict="replace"),
            says=where,
        )


def test_a_body_a_hundred_deep_is_accepted(place: Place) -> None:
    task = place.delays.schedule_delay("mail", nested(100), 60)
    assert place.delays.get(task).body == nested(100)


@pytest.mark.parametrize(
    "second", [object(), float("nan"), nested(100_000)], ids=lambda s: type(s).__name__
)
def test_a_body_that_changes_while_it_is_written_is_refused(place: Place, second: Any) -> None:
    class TwoFaced(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            face, self.face = getattr(self, "face", 1), second
            return iter([face])

    with place.refuses("body"):
        place.delays.schedule_delay("mail", TwoFaced([1]), 5)


def test_a_body_is_measured_in_bytes(make: Make) -> None:
    place = make(max_body_bytes=1000)
    for body in ("a" * 998, "é" * 499, "😀" * 249 + "aa"):
        task = place.delays.schedule_delay("mail", body, 60)
        assert place.delays.get(task).body == body
        with place.refuses("body", "1,000 bytes"):
            place.delays.schedule_delay("mail", body + "b", 60)


def test_a_body_of_the_default_size_fits_every_database(place: Place) -> None:
    body = "😀" * 65_535 + "a" * 2
    task = place.delays.schedule_delay("mail", body, 60)
    assert place.delays.get(task).body == body
    assert place.delays.schedule_many([("mail", body, 60)] * 3) == 3
    with place.refuses("body", "262,144"):
        place.delays.schedule_delay("mail", body + "b", 60)


def test_a_body_with_one_part_many_times_is_refused_without_expanding_it(place: Place) -> None:
    body: list[Any] = ["x"]
    for _ in range(90):
        body = [body, body]
    with place.refuses("body"):
        place.delays.schedule_delay("mail", body, 5)


def test_text_that_one_database_cannot_store_is_refused_on_every_database(place: Place) -> None:
    d = place.delays
    for wrap in (lambda bad: bad, lambda bad: [bad], lambda bad: {"a": bad}, lambda bad: {bad: 1}):
        bodies = [wrap(bad) for bad in UNSTORABLE]
        place.refuse("body", bodies, lambda body: d.schedule_delay("mail", body, 5), says="$")
    tagged = [lambda bad: d.schedule_delay("mail" + bad, {}, 5), lambda bad: d.find(tag=bad)]
    place.refuse("tag", UNSTORABLE, *tagged)
    place.refuse(
        "key",
        UNSTORABLE,
        lambda bad: d.schedule_delay("mail", {}, 5, key=bad),
        lambda bad: d.cancel(tag="mail", key=bad),
    )
    place.refuse("queue", UNSTORABLE, lambda bad: d.schedule_delay("mail", {}, 5, queue=bad))


def test_text_that_only_looks_unstorable_is_stored(place: Place) -> None:
    body = {"\\u0000": "\\ud800", "\x01\x1f\x7f": "\ufffe\ufeff\u2028"}
    assert place.delays.get(place.delays.schedule_delay("mail", body, 60)).body == body


def test_integers_are_exact(place: Place) -> None:
    body = [2**53 + 1, -(2**53) - 1, 2**63, 2**64 + 1, -(10**40), 10**4000, {"n": 9007199254740993}]
    task = place.delays.schedule_delay("mail", body, 60)
    assert place.delays.get(task).body == body
    assert place.delays.get(task).as_json()["body"] == body


def test_sql_in_tag_key_and_body_is_stored_literally(place: Place) -> None:
    ran: list[Any] = []
    place.delays.processor(SQL)(ran.append)
    task = place.delays.schedule_delay(SQL, {SQL: SQL}, 0, key=SQL)
    many = place.delays.schedule_many([(SQL, SQL, 60)] * 3)
    assert (many, len(place.delays.find(tag=SQL))) == (3, 4)
    found = place.delays.get(tag=SQL, key=SQL)
    assert (found.id, found.tag, found.key, found.body) == (task.id, SQL, SQL, {SQL: SQL})
    runner_of(place.delays).run([place.timer.armed[0]])
    assert ran == [{SQL: SQL}]
    assert not place.delays.find(tag="' OR '1'='1").tasks


# Statuses, queries and sessions that a call cannot use


ANSWERS: list[tuple[Status, Any]] = [(Status.NOT_COMPLETE, True), (Status.HELD, True)]
ANSWERS += [(Status.CANCELLED, False), (Status.RUNNING, "is RUNNING, not")]
ANSWERS += [(Status.DONE, "is DONE, not"), (Status.FAILED, "is FAILED, not")]


@pytest.mark.parametrize(("status", "answer"), ANSWERS, ids=lambda v: getattr(v, "name", ""))
def test_cancelling_in_each_status(place: Place, status: Status, answer: Any) -> None:
    task = place.put(status)
    if isinstance(answer, bool):
        assert bool(raised(place.delays.cancel(task))) is answer
        assert place.delays.get(task).status is Status.CANCELLED
        return
    with place.refuses(e.TaskStateError, str(task.id), answer):
        raised(place.delays.cancel(task))
    assert not place.delays.cancel(task)
    assert place.delays.get(task).status is status


def test_a_stale_version_is_refused_by_every_move(place: Place) -> None:
    for version in [1, -1, 2**70, 10**5000, "0", Unsayable()]:
        waits, failed = place.put(), place.put(Status.FAILED)
        with place.refuses(e.StaleVersionError, "version 0, not"):
            place.delays.reschedule(waits, 5, version=version)
        with place.refuses(e.StaleVersionError):
            place.delays.cancel(waits, version=version)
        with place.refuses(e.StaleVersionError, "version 0, not"):
            place.delays.rerun(failed, version=version)
        assert place.delays.get(waits).version == 0
        place.delays.reschedule(waits, 5, version=0)


# -- queries -------------------------------------------------------------------------------------


def test_a_page_is_bounded(place: Place) -> None:
    limits = [-1, 0, 1001, 10**9, 10**5000, True, 1.0, "10", None, Unsayable()]
    place.refuse("limit", limits, lambda limit: place.delays.find(limit=limit), says="1 to 1000")


def test_a_status_that_does_not_exist_is_refused(place: Place) -> None:
    wrong = [77, -1, True, "GONE", "", 1.5, Unsayable()]
    place.refuse("status", wrong, lambda it: place.delays.find(status=it), says="NOT_COMPLETE")
    place.refuse("status", [[]], lambda it: place.delays.find(status=it), says="name 1 to 1,000")


BAD_CURSORS = ["", "x", "====", "MTIz", "YTpi", "😀", "\ud800", "MTox\n;", 5, b"MTox", ["x"]]
BAD_CURSORS += ["nonsense", "AAAA", "ОК"]
#: These cursors are well formed, but no row has their numbers: 10^30:1, 1:10^30, 1:-10^30.
BAD_CURSORS += ["MTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDox"]
BAD_CURSORS += ["MToxMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw"]
BAD_CURSORS += ["MTotMTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMA=="]


def test_a_cursor_that_find_never_gave_is_refused(place: Place) -> None:
    place.put()
    place.refuse("cursor", BAD_CURSORS, lambda it: place.delays.find(cursor=it), says="cursor")


def test_calls_accept_the_earliest_and_the_latest_possible_time(place: Place) -> None:
    place.put()
    for instant in [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]:
        assert len(place.delays.find(since=instant)) + len(place.delays.find(until=instant)) == 1


# -- sessions ------------------------------------------------------------------------------------


def calls_with(place: Place, task: DelayedTask, failed: DelayedTask) -> list[Callable[[Any], Any]]:
    d = place.delays
    return [
        lambda session: d.schedule_delay("mail", {}, 5, session=session),
        lambda session: d.schedule_delay("mail", {}, 5, key="k", session=session),
        lambda session: d.schedule_many([("mail", {}, 5)], session=session),
        lambda session: d.cancel(task, session=session),
        lambda session: d.reschedule(task, 5, session=session),
        lambda session: d.touch(task, 500, session=session),
        lambda session: d.touch([task], 500, session=session),
        lambda session: d.touch(tag="mail", key=["k"], delay=500, session=session),
        lambda session: d.rerun(failed, session=session),
        lambda session: d.get(task, session=session),
        lambda session: d.find(session=session),
    ]


def test_a_closed_session_or_connection_is_refused(place: Place) -> None:
    closed = Session(place.world.engine, close_resets_only=False)
    closed.close()
    connection = place.world.engine.connect()
    connection.close()
    no_sessions = ["x", object(), 5, Session]
    calls = calls_with(place, place.put(), place.put(Status.FAILED))
    place.refuse(e.SessionUnusableError, [closed, connection, Session(), *no_sessions], *calls)


# Ids and keys that are invalid, unknown or taken


def by_id(place: Place) -> list[Callable[[Any], Any]]:
    d = place.delays
    moves = [lambda id: d.reschedule(id, 5), lambda id: d.touch(id, 5)]
    return [d.get, lambda id: raised(d.cancel(id)), *moves, d.rerun]


BAD_IDS = [
    0, -1, 2**63, 2**64, 10**5000, "9" * 5000, True, "1 OR 1=1", "", "-1", "1.0", "٣", 1.0, b"1",
    Unsayable(),
]  # fmt: skip


def test_an_id_that_is_no_id_is_refused_by_every_call(place: Place) -> None:
    task, d = place.put(), place.delays
    place.refuse(
        "id",
        BAD_IDS,
        *by_id(place),
        d.cancel,
        lambda id: d.touch([task, id], 500),
        lambda id: d.schedule_delay("mail", {}, 5, id=id),
        lambda id: d.schedule_many([NewTask("mail", {}, 5), NewTask("mail", {}, 5, id=id)]),
    )


def test_every_call_reports_an_unknown_id_as_not_found(place: Place) -> None:
    for id in [1, 2**63 - 1, "4711"]:
        place.refuse(e.TaskNotFoundError, [id], *by_id(place), says=str(id))


def test_every_call_reports_an_unknown_key_as_not_found(place: Place) -> None:
    d, name = place.delays, {"tag": "mail", "key": "k"}
    for call in (
        lambda: d.get(**name),
        lambda: raised(d.cancel(**name)),
        lambda: d.reschedule(delay=5, **name),
        lambda: d.touch(delay=5, **name),
    ):
        with place.refuses(e.TaskNotFoundError, "'mail'", "'k'"):
            call()


def test_a_task_is_named_in_one_way(place: Place) -> None:
    task = place.put(key="k")
    names = [{}, {"key": "k"}, {"tag": "mail"}, {"task": task, "tag": "mail", "key": "k"}]
    place.refuse("task", names, lambda names: place.delays.cancel(**names))


def test_touch_takes_tasks_or_keys(place: Place) -> None:
    task, touch = place.put(key="k"), place.delays.touch
    names = [{}, {"tag": "mail"}, {"key": ["k"]}, {"task": [task], "tag": "mail"}]
    names += [{"task": [task], "tag": "mail", "key": ["k"]}]
    place.refuse("task", names, lambda names: touch(delay=500, **names))
    names = [name for name in BAD_NAMES if isinstance(name, str)]
    place.refuse("tag", names, lambda tag: touch(tag=tag, key=["k"], delay=500))
    assert place.delays.get(task).expected_time == task.expected_time


def test_schedule_many_inserts_no_task_if_one_key_is_taken(place: Place) -> None:
    place.put(key="k")
    with place.refuses(e.DuplicateTaskError):
        place.delays.schedule_many(NewTask("mail", {}, 5, key=key) for key in (None, "l", "k"))


def test_a_typo_in_on_conflict_is_refused(place: Place) -> None:
    place.put(key="k")
    d = place.delays
    place.refuse(
        "on_conflict",
        ["Reject", "ignore", "", None, 1, [], Unsayable()],
        lambda typo: d.schedule_delay("mail", {}, 5, key="k", on_conflict=typo),
        lambda typo: d.schedule_many([NewTask("mail", {}, 5, key="k")], on_conflict=typo),
        says="on_conflict",
    )


def test_scheduling_the_same_id_again_changes_nothing_and_arms_the_task_again(place: Place) -> None:
    first = place.delays.schedule_delay("mail", {"n": 1}, 5, id=4711)
    before = place.traces()
    again = place.delays.schedule_delay("mail", {"n": 2}, 60, id=4711)
    assert (again.id, again.body, again.expected_time) == (4711, {"n": 1}, first.expected_time)
    # A caller repeats an id if the result of the first call is unknown, so the row may not be
    # armed.
    assert place.traces() == (*before[:-1], before[-1] + 1)
    place.delays.cancel(4711)
    place.delays.schedule_delay("mail", {"n": 2}, 0, id=4711)
    assert place.timer.ids == [4711, 4711]
    assert place.delays.get(4711).status is Status.CANCELLED


# Invalid tags, keys, queues and priorities


def test_a_tag_that_is_no_name_is_refused(place: Place) -> None:
    tags, d = [*BAD_NAMES, "x" * 129], place.delays
    place.refuse(
        "tag",
        tags,
        lambda tag: d.schedule_delay(tag, {}, 5),
        lambda tag: d.schedule_many([("mail", {}, 5), (tag, {}, 5)]),
        d.processor,
    )
    place.refuse("tag", tags[1:], lambda tag: d.find(tag=tag))


def test_a_key_that_is_no_name_is_refused(place: Place) -> None:
    d = place.delays
    place.refuse(
        "key",
        [*BAD_NAMES[1:], "x" * 192],
        lambda key: d.schedule_delay("mail", {}, 5, key=key),
        lambda key: d.schedule_many([NewTask("mail", {}, 5), NewTask("mail", {}, 5, key=key)]),
        lambda key: d.cancel(tag="mail", key=key),
        lambda key: d.get(tag="mail", key=key),
        lambda key: d.touch(tag="mail", key=["k", key], delay=5),
        lambda key: d.find(key=key),
    )


def test_a_queue_that_a_broker_could_not_have_is_refused(place: Place) -> None:
    d, paths = place.delays, ["a b", "../../etc/passwd", "a/b", "😀" * 90, "q*", "q#", "a:b"]
    place.refuse(
        "queue",
        [*BAD_NAMES[1:], *paths, "x" * 101],
        lambda queue: d.schedule_delay("mail", {}, 5, queue=queue),
        lambda queue: d.schedule_many([NewTask("mail", {}, 5, queue=q) for q in (None, queue)]),
        lambda queue: d.processor("mail", queue=queue),
    )


def test_names_at_their_longest_are_accepted(place: Place) -> None:
    tag, key, queue = "😀" * 128, "ü" * 191, "q" * 100
    task = place.delays.schedule_delay(tag, {}, 60, key=key, queue=queue)
    found = place.delays.get(tag=tag, key=key)
    assert (found.id, found.tag, found.key, found.queue) == (task.id, tag, key, queue)


class Name(str, enum.Enum):
    MAIL = "mail"
    KEY = "the key"


class Level(int, enum.Enum):
    HIGH = 9
    ID = 4711


def test_an_enum_member_is_stored_as_its_value(place: Place) -> None:
    body = {"level": Level.HIGH, "name": Name.KEY}
    options: Any = {"key": Name.KEY, "priority": Level.HIGH, "id": Level.ID}
    task = place.delays.schedule_delay(Name.MAIL, body, 60, **options)
    stored = (task.tag, task.key, task.priority, task.id)
    # The values must have plain types. A driver may write a subclass by its `str()`, "Name.MAIL".
    assert same(stored, ("mail", "the key", 9, 4711))
    found = place.delays.get(tag="mail", key="the key")
    assert (found.id, found.priority, found.body) == (4711, 9, {"level": 9, "name": "the key"})
    assert place.delays.get(Level.ID).tag == "mail"
    assert [one.id for one in place.delays.find(tag=Name.MAIL)] == [4711]


def test_a_priority_is_an_integer_from_0_to_9(place: Place) -> None:
    place.refuse(
        "priority",
        [-1, 10, True, 1.0, "1", None, 10**5000, Unsayable()],
        lambda it: place.delays.schedule_delay("mail", {}, 5, priority=it),
        lambda it: place.delays.schedule_many([NewTask("mail", {}, 5, priority=it)]),
    )


def test_a_process_with_processors_refuses_other_tags_and_names_the_nearest(make: Any) -> None:
    place = make()
    place.delays.schedule_delay("nobody", {}, 5)
    place.delays.processor("mail.send")(lambda body: None)
    place.delays.schedule_delay("mail.send", {}, 5)
    with place.refuses(e.UnknownTagError, "'mail.sent'", "did you mean 'mail.send'?"):
        place.delays.schedule_delay("mail.sent", {}, 5)
    with place.refuses(e.UnknownTagError):
        place.delays.schedule_many([("mail.send", {}, 5), ("mail.sent", {}, 5)])


TAGS: list[Any] = [({}, False, "send sent"), ({"tags": ["mail.sent"]}, False, "sent")]
TAGS += [({"tags": ["mail.sent"]}, True, "send sent"), ({"tags": "any"}, True, "send sent")]
TAGS += [({"tags": []}, True, "send"), ({"tags": []}, False, "")]


@pytest.mark.parametrize(("settings", "has_processor", "accepted"), TAGS)
def test_the_setting_tags_decides_about_other_tags(
    make: Make, settings: Any, has_processor: bool, accepted: str
) -> None:
    place = make(**settings)
    if has_processor:
        place.delays.processor("mail.send")(lambda body: None)
    for name in ("send", "sent"):
        if name in accepted.split():
            place.delays.schedule_delay(f"mail.{name}", {}, 5)
        else:
            with place.refuses(e.UnknownTagError, f"mail.{name}"):
                place.delays.schedule_delay(f"mail.{name}", {}, 5)


def test_a_limit_key_is_a_key_and_may_be_long(place: Place) -> None:
    schedule = partial(place.delays.schedule_delay, "mail", {}, 5)
    wrong = ["", " ", "a ", "a" * 256, "a\nb", 7, True]
    place.refuse("limit_key", wrong, lambda key: schedule(limit_key=key))
    assert schedule(limit_key="a" * 255).limit_key == "a" * 255


def test_a_processor_computes_the_limit_key_unless_the_call_names_one(place: Place) -> None:
    place.delays.processor("pay", limit_key=lambda body: body["customer"])(lambda body: None)
    schedule = place.delays.schedule_delay
    assert place.delays.get(schedule("pay", {"customer": "c7"}, 5)).limit_key == "c7"
    own = schedule("pay", {"customer": "c7"}, 5, limit_key="own")
    assert place.delays.get(own).limit_key == "own"
    assert place.delays.get(schedule("pay", {"customer": None}, 5)).limit_key is None
    with place.refuses("limit_key"):
        schedule("pay", {"customer": 7}, 5)


# Invalid delays and instants


BAD_DELAYS = [
    -1, -0.001, float("nan"), float("inf"), float("-inf"), True, 1e20, 10**400, -(10**5000),
    Decimal(5), timedelta(seconds=-1), timedelta.max, [5], Unsayable(),
]  # fmt: skip
#: No delays, nor options that are more than 0. (As an option, the text "5" means 5 seconds.)
BAD_OPTIONS = [*BAD_DELAYS, 0, "0s", "soon"]


def test_a_delay_that_is_no_delay_is_refused_by_every_call(place: Place) -> None:
    waits, failed, d = place.put(), place.put(Status.FAILED), place.delays
    place.refuse(
        "delay",
        [*BAD_DELAYS, "5"],
        lambda delay: d.schedule_delay("mail", {}, delay),
        lambda delay: d.schedule_many([("mail", {}, 5), ("mail", {}, delay)]),
        lambda delay: d.reschedule(waits, delay),
        lambda delay: d.touch(waits, delay),
        lambda delay: d.touch([waits], delay),
        lambda delay: d.rerun(failed, delay),
    )


def test_a_spread_is_a_delay_and_not_zero(place: Place) -> None:
    waits, d = place.put(key="k"), place.delays
    longest = MAX_DELAY_S
    place.refuse(
        "jitter",
        BAD_OPTIONS,
        lambda jitter: d.schedule_delay("mail", {}, 5, jitter=jitter),
        lambda jitter: d.schedule_many([NewTask("mail", {}, 5, jitter=jitter)]),
        lambda jitter: d.bulk.reschedule(jitter=jitter, tag="mail"),
    )
    with place.refuses("jitter", "522w6d"):
        d.schedule_delay("mail", {}, longest, jitter=longest)
    with place.refuses("delay", "jitter"):
        d.bulk.reschedule(60, jitter=60, tag="mail")
    assert d.get(waits).version == 0


def test_a_delay_above_the_limit_is_refused_and_one_at_it_is_not(place: Place) -> None:
    place.delays.schedule_delay("mail", {}, MAX_DELAY_S)
    with place.refuses("delay", "at most 522w6d"):
        place.delays.schedule_delay("mail", {}, MAX_DELAY_S + 0.001)
    with place.refuses("at"):
        place.delays.schedule_delay("mail", {}, at=datetime.max.replace(tzinfo=UTC))


def test_a_datetime_without_a_zone_is_refused_by_every_call(place: Place) -> None:
    waits, naive, d = place.put(), datetime(2030, 1, 1), place.delays
    place.refuse("at", [naive], lambda at: d.schedule_delay("mail", {}, at=at), says="2030")
    place.refuse("at", [naive], lambda at: d.schedule_many([("mail", {}, at)]))
    place.refuse("at", [naive], lambda at: d.reschedule(waits, at=at))
    place.refuse("since", [naive], lambda since: d.find(since=since))
    place.refuse("until", [naive], lambda until: d.find(until=until))


def test_an_instant_that_is_no_datetime_is_refused(place: Place) -> None:
    wrong = ["2030-01-01T00:00:00Z", 1893456000, object(), datetime(1, 1, 1, tzinfo=FAR_EAST)]
    place.refuse("at", wrong, lambda at: place.delays.schedule_delay("mail", {}, at=at))


@pytest.mark.parametrize("year", [1, 1500, 1969, 2001])
def test_the_past_is_accepted_and_runs_now(place: Place, year: int) -> None:
    ran: list[Any] = []
    place.delays.processor("mail")(ran.append)
    task = place.delays.schedule_delay("mail", year, at=datetime(year, 1, 1, tzinfo=UTC))
    assert abs(place.delays.get(task).expected_time - place.world.now()) < timedelta(seconds=5)
    moved = place.delays.reschedule(task, at=datetime(year, 1, 1, tzinfo=UTC))
    assert [entry.id for entry in place.timer.armed] == [task.id, task.id]
    runner_of(place.delays).run([place.timer.armed[-1]])
    assert ran == [year]
    assert place.delays.get(moved).status is Status.DONE


def test_a_delay_and_an_instant_together_or_neither_are_refused(place: Place) -> None:
    waits, when = place.put(), datetime(2030, 1, 1, tzinfo=UTC)
    for delay, instant in ((5, when), (None, None)):
        with place.refuses("delay"):
            place.delays.schedule_many([NewTask("mail", {}, delay=delay, at=instant)])
        with place.refuses("delay"):
            place.delays.reschedule(waits, delay, at=instant)


def test_schedule_many_refuses_an_item_that_is_not_a_task(place: Place) -> None:
    wrong: list[Any] = [None, "mail", ("mail", {}), ("mail", {}, 1, 2), ["mail", {}, 1]]
    wrong.append(Unsayable())
    place.refuse("tasks", wrong, lambda item: place.delays.schedule_many([("mail", {}, 5), item]))


# Random bodies and arguments


storable = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=40
)
json_bodies = st.recursive(
    plain | st.floats(allow_nan=False, allow_infinity=False) | storable,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(storable, inner, max_size=5),
    max_leaves=30,
)
#: Values that JSON cannot represent, anywhere in a body.
junk = st.one_of(
    *(st.binary(), st.sets(st.integers(), min_size=1), st.complex_numbers(), st.decimals()),
    *(st.just(float("nan")), st.just(float("-inf")), st.just(Ellipsis), st.functions()),
    *(st.datetimes(), st.timedeltas(), st.uuids(), st.builds(object), st.builds(Unsayable)),
    st.dictionaries(st.integers() | st.none() | st.tuples(), json_bodies, min_size=1),
    st.sampled_from(UNSTORABLE),
)
few_items = st.lists(json_bodies, max_size=2)
few_fields = st.dictionaries(storable, json_bodies, max_size=2)
junk_bodies = st.recursive(
    junk,
    lambda inner: (
        st.builds(lambda a, b, c: [*a, b, *c], few_items, inner, st.lists(json_bodies))
        | st.builds(lambda d, k, v: {**d, k: v}, few_fields, storable, inner)
    ),
    max_leaves=4,
)
anything = st.one_of(
    *(json_bodies, junk, st.integers(), st.floats(), st.text()),
    st.datetimes(timezones=st.none() | st.just(UTC)),
)
quick = fuzz(60)


ODD: list[Any] = [1e308, -1e308, 5e-324, -0.0, 2**53 + 1, 2**63, "😀", "\u2028", "\x7f\x01"]


@pytest.mark.slow
@quick
@given(bodies=st.lists(json_bodies, min_size=1, max_size=5))
@example(bodies=[*ODD, {"": [[[]]], "a": {}}])
def test_any_json_comes_back_exactly(place: Place, bodies: list[Any]) -> None:
    one = place.delays.schedule_delay("mail", bodies, 60)
    assert same(place.delays.get(one).body, bodies)
    ids: list[int] = []
    new = [("mail", body, 60) for body in bodies]
    place.delays.schedule_many(new, on_batch=lambda batch: ids.extend(t.id for t in batch))
    for id, body in zip(ids, bodies, strict=True):
        assert same(place.delays.get(id).body, body)


def same(left: Any, right: Any) -> bool:
    """Compare by `repr()`, because == treats 1, 1.0 and True as equal, and 0.0 and -0.0 too."""
    return repr(left) == repr(right)


@pytest.mark.slow
@quick
@given(body=junk_bodies)
def test_any_junk_in_a_body_is_refused(place: Place, body: Any) -> None:
    before = place.traces()
    with pytest.raises(e.InvalidInputError, match=r"^\$"):
        place.delays.schedule_delay("mail", body, 60)
    assert place.traces() == before


@pytest.mark.slow
@quick
@given(data=st.data())
def test_any_arguments_give_a_task_or_our_error(place: Place, data: st.DataObject) -> None:
    def some(*good: Any) -> Any:
        return data.draw(st.sampled_from(good or (None,)) | anything)

    calls: list[Callable[[], Any]] = [
        lambda: place.delays.schedule_delay(
            some("mail"),
            some({}),
            some(5),
            key=some(None, "k"),
            on_conflict=some("keep", "replace"),
            queue=some(None),
            priority=some(0),
            id=some(None, 5),
            limit_key=some(None, "k"),
            jitter=some(None, 5),
        ),
        lambda: place.delays.schedule_delay(
            some("mail"), some({}), at=some(datetime(2030, 1, 1, tzinfo=UTC))
        ),
        lambda: place.delays.schedule_many([some(), (some("mail"), some({}), some(5))]),
        lambda: place.delays.schedule_many(
            [NewTask(some("mail"), some({}), some(5), some(None), some(None))]
        ),
        lambda: place.delays.cancel(some(5), version=some(None)),
        lambda: place.delays.reschedule(some(5), some(5), version=some(None)),
        lambda: place.delays.touch(tag=some("mail"), key=some("k"), delay=some(5)),
        lambda: place.delays.touch(some([5]), some(5)),
        lambda: place.delays.touch(tag=some("mail"), key=[some("k")], delay=some(5)),
        lambda: place.delays.rerun(some(5), some(5)),
        lambda: place.delays.find(
            tag=some(None), key=some(None), status=some(None), cursor=some(None), limit=some(10)
        ),
    ]
    before = place.traces()
    try:
        data.draw(st.sampled_from(calls))()
    except e.DelayTaskError:
        assert place.traces() == before
