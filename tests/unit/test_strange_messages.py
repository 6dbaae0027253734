"""Malformed messages raise no exception in the worker, which refuses them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import Empty
from typing import Any

import pytest
from celery import Celery
from celery.worker import state
from celery.worker.consumer import Consumer
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Queue
from kombu.asynchronous.timer import Timer
from kombu.message import Message
from kombu.serialization import prepare_accept_content

from delaytasks.core.ids import MAX_ID
from delaytasks.storage.store import Store
from delaytasks.timers.arming import RUN, SWEEP
from delaytasks.worker.broker_connection import GuardStep
from tests.fuzzing import fuzz, json_like
from tests.world import Entry, MainProcess, World

DUE = 1_700_000_000_000_000


MakeReader = Callable[..., "GuardedConsumer"]


class Channel:
    no_ack_consumers = None

    def basic_ack(self, *_: Any, **__: Any) -> None: ...
    def basic_reject(self, *_: Any, **__: Any) -> None: ...


class GuardedConsumer:
    """Celery's consumer with the steps of delaytasks.

    The calls of the worker runtime are recorded.
    """

    def __init__(self, store: Store, **conf: Any) -> None:
        self.world = World(store)
        self.runtime = MainProcess(self.world).runtime
        self.app: Celery = self.world.runtime.celery
        self.app.conf.update(conf)
        worker = self.runtime.celery_worker
        worker.delays_runtime, worker.use_eventloop, worker.state = self.runtime, False, state
        options = {"app": self.app, "controller": worker, "hostname": "w", "timer": Timer()}
        self.consumer = Consumer(lambda *_: None, **options)

        class tasks:
            queues = [self.runtime.runtime.publisher.queue("default")]

        self.consumer.task_consumer, self.consumer.pool = tasks, worker.pool
        self.consumer.update_strategies()
        self.handle = self.consumer.create_task_handler()
        self.entries: list[Entry] = []
        self.drained: list[tuple[Any, ...]] = []
        self.sweeps: list[Any] = []
        self.runtime.dispatcher.receive = self.entries.extend  # type: ignore[assignment, method-assign]
        self.runtime.dispatcher.start_drain = lambda *asked: self.drained.append(asked)  # type: ignore[method-assign]
        self.runtime.sweep_loop.request = self.sweeps.append  # type: ignore[assignment, method-assign]

    def read(
        self, body: Any, headers: Any = None, kind: Any = "application/json", **more: Any
    ) -> Message:
        delivery = more.pop("delivery_info", {"routing_key": "delaytasks.default"})
        headers = {"task": RUN, "id": "x"} if headers is None else headers
        parts: Any = (body, 1, kind, "utf-8", delivery, {}, headers, "utf-8", None, Channel())
        message = Message(*parts, **more)
        message.accept = prepare_accept_content(self.app.conf.accept_content)
        self.handle(message)
        return message

    @property
    def refused(self) -> int:
        return self.runtime.events.counts["message.refused"]


@pytest.fixture(scope="module")
def reader(session_store: Store) -> Iterator[GuardedConsumer]:
    made = GuardedConsumer(session_store)
    yield made
    made.world.close()


@pytest.fixture
def make_reader(store: Store) -> Iterator[MakeReader]:
    with ExitStack() as stack:

        def make(**conf: Any) -> GuardedConsumer:
            made = GuardedConsumer(store, **conf)
            stack.callback(made.world.close)
            return made

        yield make


@pytest.fixture(autouse=True)
def _forget(reader: GuardedConsumer) -> None:
    for asked in (reader.entries, reader.drained, reader.sweeps):
        asked.clear()


def test_a_token_for_another_workers_queue_is_refused(reader: GuardedConsumer) -> None:
    """In Redis the queue of a message is a field of the message."""
    before, place = reader.refused, {"routing_key": "delaytasks.payments"}
    reader.read(json.dumps([[[], {"drain": [0]}], {}, {}]), delivery_info=place)
    assert (reader.drained, reader.refused) == ([], before + 1)


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
deliveries: st.SearchStrategy[Any] = st.just({}) | st.sampled_from(
    [{"routing_key": place} for place in PLACES]
)
#: The version 2**63 is one that no row can have.
BIG = b"[[[[1, 9223372036854775808, 0, 0]]], {}, {}]"


@fuzz(200)
@given(body, headers, kinds, deliveries)
@example(b"[]", OF_RUN, JSON, {})
@example(b"[]", {"task": ["unhashable"]}, JSON, {})
@example(b"{}", {"task": "no.such.task"}, JSON, {})
@example(BIG, OF_RUN, JSON, {})
@example(b"[[[], {'drain': []}]]", {"task": RUN, "expires": 5}, JSON, {"routing_key": ["x"]})
def test_any_message_is_acknowledged_or_refused(
    reader: GuardedConsumer, body: Any, headers: Any, kind: Any, delivery: Any
) -> None:
    message = reader.read(body, headers, kind, delivery_info=delivery)
    assert message.acknowledged or message.errors
    for entry in reader.entries:
        assert 0 < entry.id <= MAX_ID
        assert 0 <= entry.version < 2**63
        assert entry.due_us >= 0
        assert -(2**15) <= entry.priority < 2**15
    for queue, priorities, _ in reader.drained:
        assert (type(queue), len(priorities) <= 100) == (str, True)
    assert all(sweep_partition in (None, 0) for sweep_partition in reader.sweeps)


@fuzz(200)
@given(payload)
def test_accepted_entries_equal_the_sent_ones(reader: GuardedConsumer, payload: Any) -> None:
    """The messages cause only their own entries, drains and sweeps."""
    reader.entries.clear()
    reader.read(json.dumps(payload))
    if reader.entries:
        sent = payload["args"] if isinstance(payload, dict) else payload[0]
        assert [[e.id, e.version, e.due_us, e.priority] for e in reader.entries] == sent[0]


# -- content that could run code during decoding --------------------------------------------------

ran: list[str] = []


class Bomb:
    def __reduce__(self) -> Any:
        return ran.append, ("boom",)


@pytest.mark.parametrize(
    "headers", [{"task": RUN, "id": "x"}, {}, {"task": "test.other", "id": "x"}]
)
@pytest.mark.parametrize("routing_key", ["delaytasks.default", "celery"])
def test_pickle_is_not_read_from_queues_of_delaytasks_even_if_the_app_accepts_it(
    make_reader: MakeReader, headers: dict[str, Any], routing_key: str
) -> None:
    """In Redis the queue of a message is a field of the message."""
    reader = make_reader(accept_content=["json", "pickle"])
    bomb = pickle.dumps({"task": RUN, "args": [[Bomb()]], "id": "x", "kwargs": {}})
    message = reader.read(bomb, headers, PICKLE, delivery_info={"routing_key": routing_key})
    assert message.acknowledged
    assert (ran, reader.refused) == ([], 1)


def test_queues_of_the_app_are_read_with_its_content_types(make_reader: MakeReader) -> None:
    reader = make_reader(accept_content=["json", "pickle"])
    reader.consumer.task_consumer.queues.append(Queue("celery"))
    reader.read(pickle.dumps([1]), {}, PICKLE, delivery_info={"routing_key": "celery"})
    assert reader.refused == 0
    reader.read(pickle.dumps([1]), {}, PICKLE)
    assert reader.refused == 1


@pytest.mark.parametrize(
    ("accepted", "told"), [(["json"], 0), (["json", "msgpack"], 0), (["pickle", "json"], 1)]
)
def test_a_worker_reports_that_the_app_accepts_content_that_can_run_code(
    make_reader: MakeReader, accepted: Any, told: int
) -> None:
    reader = make_reader(accept_content=accepted)
    reader.world.runtime.checks.check_broker()
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
    message = backend.read(json.dumps([["x"], {}, {}]), {**OF_RUN, "ignore_result": False})
    assert message.acknowledged
    assert backend.app.backend.get_state("x") == "PENDING"


# -- the transport --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no JSON"), KeyError("properties"), TypeError(), RecursionError()]
)
def test_an_unreadable_message_is_refused(reader: GuardedConsumer, error: Exception) -> None:
    before = reader.refused
    assert GuardStep(reader.consumer)._guarded(raiser(error))() is None
    assert reader.refused == before + 1


def test_errors_of_a_lost_broker_or_an_empty_queue_are_unchanged(reader: GuardedConsumer) -> None:
    for error in (Empty(), reader.consumer.connection_errors[0]()):
        with pytest.raises(type(error)):
            GuardStep(reader.consumer)._guarded(raiser(error))()


def raiser(error: Exception) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read
