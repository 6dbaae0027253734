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
from sqlalchemy import func, select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, NewTask, Status
from delaytasks.model.inputs import MAX_DELAY_S
from tests.conformance.test_transactions import every_call
from tests.conftest import closing_all
from tests.fuzzing import fuzz, plain
from tests.refusals import raised
from tests.world import World, status_columns

UTC = timezone.utc
FAR_EAST = timezone(timedelta(hours=14))
SQL = "x'; DROP TABLE s_yb_delay_task_message; -- %s %(a)s :id \\ \" ?"


class Place(World):
    """A world that checks the side effects of refused calls."""

    def traces(self) -> tuple[int, ...]:
        """Return the number of rows of each table and the number of messages sent."""
        tables = self.table().metadata.sorted_tables
        counts = [select(func.count()).select_from(table).scalar_subquery() for table in tables]
        [rows] = self.rows(select(*counts))
        return (*rows, len(self.broker.armed))

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

    def mail(self, status: Status = Status.NOT_COMPLETE, **options: Any) -> DelayedTask:
        task = self.delays.schedule_delay("mail", {"n": 1}, 60, **options)
        self.change(task, **status_columns(status))
        return task


class Unsayable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


Make = Callable[..., Place]


@pytest.fixture
def make(store: Any) -> Iterator[Make]:
    with closing_all(partial(Place, store)) as make:
        yield make


@pytest.fixture
def place(make: Make) -> Place:
    return make()


# Invalid arguments


#: The ids of a task that waits and has the key `k`, and of one that has failed.
WAITS, FAILED = 41, 42
UNSTORABLE = ["a\x00b", "\x00", "\ud800", "x\udfff", "\udc00\ud800"]
BAD_NAMES = [
    None, "", " ", "\t", "a\nb", "a\r\nb", "\x1b[31mred", "a\x7f", "\u202e", "\u2028",
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
#: No delays, nor options that are more than 0. (As an option, the text "5" means 5 seconds.)
BAD_OPTIONS = [*BAD_DELAYS, 0, "0s", "soon"]
NAIVE, THEN = datetime(2030, 1, 1), datetime(2030, 1, 1, tzinfo=UTC)
BAD_INSTANTS = [NAIVE, "2030-01-01T00:00:00Z", 1893456000, object()]
BAD_INSTANTS += [datetime(1, 1, 1, tzinfo=FAR_EAST), datetime.max.replace(tzinfo=UTC)]
BAD_ITEMS: list[Any] = [
    None,
    "mail",
    ("mail", {}),
    ("mail", {}, 1, 2),
    ["mail", {}, 1],
    Unsayable(),
]
TWICE_NAMED = {"task": WAITS, "tag": "mail", "key": "k"}
NO_TOUCH = [{"key": ["k"]}, {"task": [WAITS], "tag": "mail"}, TWICE_NAMED | {"key": ["k"]}]


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


#: Bodies that JSON or a database cannot represent, and the path of the bad value.
BAD_BODIES: list[tuple[Any, str]] = [
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
    (doubled(), ""),
    ({"price": Decimal("1.5")}, "$.price"),
    ([THEN], "$[0]"),
    ([uuid.uuid4()], "$[0]"),
    ({"f": print}, "$.f"),
    (Unsayable(), "$"),
    ({"n": [10**5000]}, "$.n[0]"),
    (range(3), "$"),
    *((body, "$") for bad in UNSTORABLE for body in (bad, [bad], {"a": bad}, {bad: 1})),
]


def schedule(d: DelayTasks, tag: Any = "mail", delay: Any = 5, **options: Any) -> object:
    return d.schedule_delay(tag, {}, delay, **options)


def schedule_many(d: DelayTasks, tag: Any = "mail", delay: Any = 5, **options: Any) -> object:
    return d.schedule_many([("mail", {}, 5), NewTask(tag, {}, delay, **options)])


Call = Callable[[DelayTasks, Any], object]
BY_ID: list[Call] = [DelayTasks.get, DelayTasks.rerun, lambda d, id: raised(d.cancel(id))]
BY_ID += [lambda d, id: d.reschedule(id, 5), lambda d, id: d.touch(id, 5)]
WITH_BODY: list[Call] = [
    lambda d, body: d.schedule_delay("mail", body, 5),
    lambda d, body: d.schedule_many([("mail", {}, 5), ("mail", body, 5)]),
    lambda d, body: d.schedule_delay("mail", body, 5, key="k", on_conflict="replace"),
]


def of(error: Any, values: Sequence[Any], *calls: Call, says: str = "") -> tuple[Any, ...]:
    return error, says, values, calls


def option(name: str) -> list[Call]:
    """Return the calls that take this option of a task."""
    return [lambda d, it: schedule(d, **{name: it}), lambda d, it: schedule_many(d, **{name: it})]


#: The argument or the error, the values, the calls that refuse each, and what the error says.
REFUSED = [
    of("tag", [*BAD_NAMES, "x" * 129], schedule, schedule_many, DelayTasks.processor),
    of("tag", [*BAD_NAMES[1:], "x" * 129], lambda d, it: d.find(tag=it)),
    of("tag", BAD_NAMES[1:10] + UNSTORABLE, lambda d, it: d.touch(tag=it, key=["k"], delay=5)),
    of(
        "key",
        [*BAD_NAMES[1:], "x" * 192],
        *option("key"),
        lambda d, it: d.cancel(tag="mail", key=it),
        lambda d, it: d.get(tag="mail", key=it),
        lambda d, it: d.touch(tag="mail", key=["k", it], delay=5),
        lambda d, it: d.find(key=it),
    ),
    of(
        "queue",
        [*BAD_NAMES[1:], *BAD_QUEUES],
        *option("queue"),
        lambda d, it: d.processor("mail", queue=it),
    ),
    of("id", BAD_IDS, *BY_ID, DelayTasks.cancel, *option("id")),
    of("id", BAD_IDS, lambda d, it: d.touch([WAITS, it], 500)),
    of(
        "delay",
        [*BAD_DELAYS, "5"],
        *option("delay"),
        lambda d, it: d.reschedule(WAITS, it),
        lambda d, it: d.touch(WAITS, it),
        lambda d, it: d.touch([WAITS], it),
        lambda d, it: d.rerun(FAILED, it),
    ),
    of(
        "delay",
        [{"delay": 5, "at": THEN}, {"delay": None}],
        lambda d, it: schedule_many(d, **it),
        lambda d, it: d.reschedule(WAITS, **it),
    ),
    of(
        "at",
        BAD_INSTANTS,
        lambda d, it: schedule(d, delay=None, at=it),
        lambda d, it: d.reschedule(WAITS, at=it),
    ),
    of("at", [NAIVE], lambda d, it: d.schedule_many([("mail", {}, it)]), says="2030"),
    of("since", [NAIVE], lambda d, it: d.find(since=it)),
    of("until", [NAIVE], lambda d, it: d.find(until=it)),
    of("jitter", BAD_OPTIONS, *option("jitter")),
    of("jitter", BAD_OPTIONS, lambda d, it: d.bulk.reschedule(jitter=it, tag="mail")),
    of("jitter", [MAX_DELAY_S], lambda d, it: schedule(d, delay=it, jitter=it), says="522w6d"),
    of("delay", [60], lambda d, it: d.bulk.reschedule(it, jitter=it, tag="mail"), says="jitter"),
    of("priority", [-1, 10, True, 1.0, "1", None, 10**5000, Unsayable()], *option("priority")),
    of("limit_key", ["", " ", "a ", "a" * 256, "a\nb", 7, True], *option("limit_key")),
    of(
        "on_conflict",
        ["Reject", "ignore", "", None, 1, [], Unsayable()],
        lambda d, it: schedule(d, key="k", on_conflict=it),
        lambda d, it: d.schedule_many([NewTask("mail", {}, 5, key="k")], on_conflict=it),
        says="on_conflict",
    ),
    of("tasks", BAD_ITEMS, lambda d, it: d.schedule_many([("mail", {}, 5), it])),
    of(
        "limit",
        [-1, 0, 1001, 10**9, 10**5000, True, 1.0, "10", None, Unsayable()],
        lambda d, it: d.find(limit=it),
        says="1 to 1000",
    ),
    of(
        "status",
        [77, -1, True, "GONE", "", 1.5, Unsayable()],
        lambda d, it: d.find(status=it),
        says="NOT_COMPLETE",
    ),
    of("status", [[]], lambda d, it: d.find(status=it), says="name 1 to 1,000"),
    of("cursor", BAD_CURSORS, lambda d, it: d.find(cursor=it), says="cursor"),
    of("task", [{}, {"key": "k"}, {"tag": "mail"}, TWICE_NAMED], lambda d, it: d.cancel(**it)),
    of("task", [{}, {"tag": "mail"}, *NO_TOUCH], lambda d, it: d.touch(delay=500, **it)),
    *(of("body", [body], *WITH_BODY, says=where) for body, where in BAD_BODIES),
    *(of(e.TaskNotFoundError, [id], *BY_ID, says=str(id)) for id in (1, 2**63 - 1, "4711")),
    of(
        e.StaleVersionError,
        [1, -1, 2**70, 10**5000, "0", Unsayable()],
        lambda d, it: d.reschedule(WAITS, 5, version=it),
        lambda d, it: d.cancel(WAITS, version=it),
        lambda d, it: d.rerun(FAILED, version=it),
        says="version 0, not",
    ),
    of(
        e.DuplicateTaskError,
        [(None, "l", "k")],
        lambda d, keys: d.schedule_many(NewTask("mail", {}, 5, key=key) for key in keys),
    ),
]


@pytest.mark.parametrize(("error", "says", "values", "calls"), REFUSED)
def test_an_invalid_argument_is_refused_by_every_call(
    place: Place, error: Any, says: str, values: Sequence[Any], calls: Sequence[Call]
) -> None:
    before = [place.mail(id=WAITS, key="k"), place.mail(Status.FAILED, id=FAILED)]
    before = [place.read(task) for task in before]
    for value in values:
        for call in calls:
            with place.refuses(error, says):
                call(place.delays, value)
    assert [place.read(task) for task in before] == before


def test_a_closed_session_or_connection_is_refused(place: Place) -> None:
    closed = Session(place.engine, close_resets_only=False)
    closed.close()
    connection = place.engine.connect()
    connection.close()
    task, failed, d = place.mail(), place.mail(Status.FAILED), place.delays
    for session in [closed, connection, Session(), "x", object(), 5, Session]:
        calls = every_call(d, task, failed, session)
        calls += [partial(d.get, task, session=session), partial(d.find, session=session)]
        calls.append(partial(d.touch, tag="mail", key=["k"], delay=500, session=session))
        for call in calls:
            with place.refuses(e.SessionUnusableError):
                call()


def test_a_body_that_changes_while_it_is_written_is_refused(place: Place) -> None:
    class TwoFaced(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            face, self.face = getattr(self, "face", 1), nested(100_000)
            return iter([face])

    with place.refuses("body"):
        place.delays.schedule_delay("mail", TwoFaced([1]), 5)


@pytest.mark.parametrize(
    ("tags", "has_processor", "accepted"),
    [
        ("auto", False, "send sent"),
        ("auto", True, "send"),
        (["mail.sent"], False, "sent"),
        (["mail.sent"], True, "send sent"),
        ("any", True, "send sent"),
        ([], False, ""),
    ],
)
def test_the_setting_tags_decides_about_tags_without_a_processor(
    make: Make, tags: Any, has_processor: bool, accepted: str
) -> None:
    place = make(tags=tags)
    place.runtime.registry._processors.clear()
    if has_processor:
        place.delays.processor("mail.send")(lambda body: None)
    for tag in ("mail.send", "mail.sent"):
        if tag.removeprefix("mail.") in accepted.split():
            place.delays.schedule_delay(tag, {}, 5)
            continue
        with place.refuses(e.UnknownTagError, tag, "did you mean 'mail.sen" if accepted else ""):
            place.delays.schedule_delay(tag, {}, 5)
        with place.refuses(e.UnknownTagError):
            place.delays.schedule_many([(tag, {}, 5)])


# What is accepted


def test_a_body_a_hundred_deep_is_accepted(place: Place) -> None:
    task = place.delays.schedule_delay("mail", nested(100), 60)
    assert place.delays.get(task).body == nested(100)


def test_a_body_is_measured_in_bytes(make: Make) -> None:
    place = make(max_body_bytes=1000)
    for body in ("a" * 998, "é" * 499, "😀" * 249 + "aa"):
        task = place.delays.schedule_delay("mail", body, 60)
        assert place.delays.get(task).body == body
        with place.refuses("body", "1,000 bytes"):
            place.delays.schedule_delay("mail", body + "b", 60)


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
    place.worker().run_entries(place.broker.armed[:1])
    assert ran == [{SQL: SQL}]
    assert not place.delays.find(tag="' OR '1'='1").tasks


def test_calls_accept_the_earliest_and_the_latest_possible_time(place: Place) -> None:
    place.mail()
    for instant in [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]:
        assert len(place.delays.find(since=instant)) + len(place.delays.find(until=instant)) == 1


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
    assert place.broker.ids == [4711, 4711]
    assert place.delays.get(4711).status is Status.CANCELLED


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


def test_a_processor_computes_the_limit_key_unless_the_call_names_one(place: Place) -> None:
    place.delays.processor("pay", limit_key=lambda body: body["customer"])(lambda body: None)
    schedule = place.delays.schedule_delay
    assert place.delays.get(schedule("pay", {"customer": "c7"}, 5)).limit_key == "c7"
    own = schedule("pay", {"customer": "c7"}, 5, limit_key="own")
    assert place.delays.get(own).limit_key == "own"
    assert place.delays.get(schedule("pay", {"customer": None}, 5)).limit_key is None
    with place.refuses("limit_key"):
        schedule("pay", {"customer": 7}, 5)


def test_a_delay_above_the_limit_is_refused_and_one_at_it_is_not(place: Place) -> None:
    place.delays.schedule_delay("mail", {}, MAX_DELAY_S)
    with place.refuses("delay", "at most 522w6d"):
        place.delays.schedule_delay("mail", {}, MAX_DELAY_S + 0.001)
    with place.refuses("at"):
        place.delays.schedule_delay("mail", {}, at=datetime.max.replace(tzinfo=UTC))


@pytest.mark.parametrize("year", [1, 1500, 1969, 2001])
def test_the_past_is_accepted_and_runs_now(place: Place, year: int) -> None:
    ran: list[Any] = []
    place.delays.processor("mail")(ran.append)
    task = place.delays.schedule_delay("mail", year, at=datetime(year, 1, 1, tzinfo=UTC))
    assert abs(place.delays.get(task).expected_time - place.now()) < timedelta(seconds=5)
    moved = place.delays.reschedule(task, at=datetime(year, 1, 1, tzinfo=UTC))
    assert [entry.id for entry in place.broker.armed] == [task.id, task.id]
    place.worker().run_entries(place.broker.armed[-1:])
    assert ran == [year]
    assert place.delays.get(moved).status is Status.DONE


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
