"""Malformed messages raise no exception in the worker, which refuses them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzzing import fuzz, json_like
from tests.world import MakeWorld, World
from tests.world.messages import Receiver

RUN, SWEEP, DUE = "delaytasks.run", "delaytasks.sweep", 1_700_000_000_000_000
MakeReader = Callable[..., Receiver]


@pytest.fixture(scope="module")
def reader(session_store: Any) -> Iterator[Receiver]:
    world = World(session_store)
    yield Receiver(world)
    world.close()


@pytest.fixture
def make_reader(make_world: MakeWorld) -> MakeReader:
    return lambda **conf: Receiver(make_world(), **conf)


def test_a_token_for_another_workers_queue_is_refused(reader: Receiver) -> None:
    """In Redis the queue of a message is a field of the message."""
    before = reader.refused
    reader.forget()
    body = json.dumps([[[], {"drain": [0]}], {}, {}])
    reader.read(body, OF_RUN, queue="delaytasks.payments")
    assert (reader.drained, reader.refused) == ([], before + 1)
    reader.read(body, OF_RUN)
    assert len(reader.drained) == 1


integers = [DUE, 2**63 - 1, 2**63, 2**70, True, 1.0, "1"]
entry = st.lists(st.integers(-5, 9) | st.sampled_from(integers), max_size=5)
args = st.lists(st.lists(entry, max_size=4) | json_like, max_size=3) | json_like
of_args = st.builds(lambda a: [a, {}, {}], args)
payload = of_args | st.builds(lambda a: {"args": a, "task": RUN}, args) | json_like
ODD_BODIES = ["", "[", "[" * 100_000, "NaN", "[[[[1,0,1e400,0]]]]", "9" * 5000]
body = (
    st.builds(json.dumps, payload)
    | st.builds(lambda p: json.dumps(p).encode(), payload)
    | st.binary(max_size=60)
    | st.none()
    | st.sampled_from([*ODD_BODIES, pickle.dumps([[[]]])])
)
NAMES = ["task", "id", "expires", "eta", "compression", "ignore_result", "timelimit", "x"]
TIMES = ["9999-12-31T00:00:00", "0001-01-01", "now"]
values = json_like | st.sampled_from([RUN, SWEEP, "no.such.task", "gzip", *TIMES])
header = st.dictionaries(st.sampled_from(NAMES), values)
OF_RUN = {"task": RUN, "id": "x"}
usual: Any = [OF_RUN, {"task": SWEEP, "id": "x"}, {}]
headers: st.SearchStrategy[Any] = st.sampled_from(usual) | header
PICKLE, JSON = "application/x-python-serialize", "application/json"
OTHER_KINDS = [PICKLE, "application/x-yaml", "application/data", "text/plain", "", None, 5]
kinds = st.just(JSON) | st.sampled_from(OTHER_KINDS)
PLACES: list[Any] = ["delaytasks.default", "celery", 5]
queues = st.none() | st.sampled_from(PLACES)
#: The version 2**63 is one that no row can have.
BIG = b"[[[[1, 9223372036854775808, 0, 0]]], {}, {}]"
GOOD = b"[[[[7, 1, 1700000000000000, 5], [8, 0, 1, 0]]], {}, {}]"


@fuzz(300)
@given(body, headers, kinds, queues)
@example(b"[]", OF_RUN, JSON, None)
@example(b"[]", {"task": ["unhashable"]}, JSON, None)
@example(b"{}", {"task": "no.such.task"}, JSON, None)
@example(BIG, OF_RUN, JSON, None)
@example(GOOD, OF_RUN, JSON, None)
@example(b"[[[], {'drain': []}]]", {"task": RUN, "expires": 5}, JSON, ["x"])
def test_any_message_is_acknowledged_or_refused(
    reader: Receiver, body: Any, headers: Any, kind: Any, queue: Any
) -> None:
    reader.forget()
    message = reader.read(body, headers, kind, queue)
    assert message.acknowledged or message.errors
    entries = [[e.id, e.version, e.due_us, e.priority] for e in reader.entries]
    assert body != GOOD or len(entries) == 2
    for id, version, due_us, priority in entries:
        assert (0 < id < 2**63, 0 <= version < 2**63, due_us >= 0) == (True,) * 3
        assert -(2**15) <= priority < 2**15
    if entries:
        sent = json.loads(body)
        assert entries == (sent["args"] if isinstance(sent, dict) else sent[0])[0]
    for queue, priorities, _ in reader.drained:
        assert (type(queue), len(priorities) <= 100) == (str, True)
    assert all(sweep_partition in (None, 0) for sweep_partition in reader.sweeps)


# -- content that could run code during decoding --------------------------------------------------

ran: list[str] = []


def explode() -> None:
    ran.append("boom")


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ()  # not `ran.append`, which pickle would call on a copy of the list


@pytest.mark.parametrize("headers", [{"task": RUN, "id": "x"}, {}, {"task": "other", "id": "x"}])
@pytest.mark.parametrize("queue", ["delaytasks.default", "celery"])
def test_our_queues_never_accept_pickle(make_reader: MakeReader, headers: Any, queue: str) -> None:
    """In Redis the queue of a message is a field of the message."""
    reader = make_reader(accept_content=["json", "pickle"])
    bomb = pickle.dumps({"task": RUN, "args": [[Bomb()]], "id": "x", "kwargs": {}})
    assert reader.read(bomb, headers, PICKLE, queue).acknowledged
    assert (ran, reader.refused) == ([], 1)


def test_queues_of_the_app_are_read_with_its_content_types(make_reader: MakeReader) -> None:
    reader = make_reader(accept_content=["json", "pickle"])
    reader.serve("celery")
    reader.read(pickle.dumps([1]), {}, PICKLE, "celery")
    assert reader.refused == 0
    reader.read(pickle.dumps([1]), {}, PICKLE)
    assert reader.refused == 1


@pytest.mark.parametrize(
    ("accepted", "told"), [(["json"], 0), (["json", "msgpack"], 0), (["pickle", "json"], 1)]
)
def test_accepting_code_is_reported(make_reader: MakeReader, accepted: Any, told: int) -> None:
    reader = make_reader(accept_content=accepted)
    reader.check_app()
    told_of = reader.world.told("content.unsafe")
    assert [fields["accepts"] for fields in told_of] == ["pickle"] * told


def test_messages_of_delaytasks_write_no_results_to_a_backend(make_reader: MakeReader) -> None:
    """An app has no result backend by default, and our messages do not use an app's backend."""
    assert make_reader().app.conf.result_backend is None
    backend = make_reader(result_backend="cache+memory://")
    for name in (RUN, SWEEP):
        task = backend.app.tasks[name]
        assert task.ignore_result
        assert not task.store_errors_even_if_ignored
    headers = {**OF_RUN, "ignore_result": False}
    assert backend.read(json.dumps([["x"], {}, {}]), headers).acknowledged
    assert backend.app.backend.get_state("x") == "PENDING"


# -- the transport --------------------------------------------------------------------------------


def test_an_unreadable_message_is_refused_and_other_errors_are_unchanged(reader: Receiver) -> None:
    before = reader.refused
    errors = [ValueError("no JSON"), KeyError("properties"), TypeError(), RecursionError()]
    for error in errors:
        reader.fail(error)
    assert reader.refused == before + len(errors)
    for lost in (Empty(), reader.lost_broker()):
        with pytest.raises(type(lost)):
            reader.fail(lost)
    assert reader.refused == before + len(errors)
