"""Random bodies and arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaytasks import NewTask
from delaytasks.core import errors as e
from tests.conformance.bad_input.refusing_client import UNSTORABLE, UTC, RefusingClient, Unsayable
from tests.fuzzing import fuzz

pytestmark = pytest.mark.slow

storable = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=40
)
json_bodies = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(storable, inner, max_size=5),
    max_leaves=30,
)
#: Values that JSON cannot represent, anywhere in a body.
junk = st.one_of(
    st.binary(),
    st.sets(st.integers(), min_size=1),
    st.just(float("nan")),
    st.just(float("-inf")),
    st.complex_numbers(),
    st.decimals(),
    st.datetimes(),
    st.timedeltas(),
    st.uuids(),
    st.builds(object),
    st.builds(Unsayable),
    st.just(Ellipsis),
    st.functions(),
    st.dictionaries(st.integers() | st.none() | st.tuples(), json_bodies, min_size=1),
    st.sampled_from(UNSTORABLE),
)
junk_bodies = st.recursive(
    junk,
    lambda inner: (
        st.builds(
            lambda a, b, c: [*a, b, *c],
            st.lists(json_bodies, max_size=2),
            inner,
            st.lists(json_bodies),
        )
        | st.builds(
            lambda d, k, v: {**d, k: v},
            st.dictionaries(storable, json_bodies, max_size=2),
            storable,
            inner,
        )
    ),
    max_leaves=4,
)
anything = st.one_of(
    json_bodies,
    junk,
    st.integers(),
    st.floats(),
    st.text(),
    st.datetimes(timezones=st.none() | st.just(UTC)),
)
quick = fuzz(60)


@quick
@given(bodies=st.lists(json_bodies, min_size=1, max_size=5))
@example(
    bodies=[
        1e308,
        -1e308,
        5e-324,
        -0.0,
        2**53 + 1,
        2**63,
        "😀",
        "\u2028",
        {"": [[[]]], "a": {}},
        "\x7f\x01",
    ]
)
def test_any_json_comes_back_exactly(place: RefusingClient, bodies: list[Any]) -> None:
    one = place.delays.schedule_delay("mail", bodies, 60)
    assert same(place.delays.get(one).body, bodies)
    ids: list[int] = []
    place.delays.schedule_many(
        [("mail", body, 60) for body in bodies],
        on_batch=lambda batch: ids.extend(t.id for t in batch),
    )
    for id, body in zip(ids, bodies, strict=True):
        assert same(place.delays.get(id).body, body)


def same(left: Any, right: Any) -> bool:
    """Compare by `repr()`, because == treats 1, 1.0 and True as equal, and 0.0 and -0.0 too."""
    return repr(left) == repr(right)


@quick
@given(body=junk_bodies)
def test_any_junk_in_a_body_is_refused(place: RefusingClient, body: Any) -> None:
    before = place.traces()
    with pytest.raises((e.BodyNotJSONError, e.BodyNotStorableError)):
        place.delays.schedule_delay("mail", body, 60)
    assert place.traces() == before


@quick
@given(data=st.data())
def test_any_arguments_are_answered_with_a_task_or_with_our_error(
    place: RefusingClient, data: st.DataObject
) -> None:
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
            max_wait=some(None, 5),
            concurrency_key=some(None, "k"),
            spread=some(None, 5),
        ),
        lambda: place.delays.schedule_at(
            some("mail"), some({}), some(datetime(2030, 1, 1, tzinfo=UTC))
        ),
        lambda: place.delays.schedule_many([some(), (some("mail"), some({}), some(5))]),
        lambda: place.delays.schedule_many(
            [NewTask(some("mail"), some({}), some(5), some(None), some(None))]
        ),
        lambda: place.delays.cancel(some(5), version=some(None)),
        lambda: place.delays.reschedule(some(5), some(5), version=some(None)),
        lambda: place.delays.touch(tag=some("mail"), key=some("k"), delay=some(5)),
        lambda: place.delays.touch_many(some([5]), some(5)),
        lambda: place.delays.touch_many(tag=some("mail"), keys=[some("k")], delay=some(5)),
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
