"""Malformed messages raise no exception in the worker, which refuses them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
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
from delaytasks.core.interfaces import Entry
from delaytasks.storage.store import Store
from delaytasks.timers.arming import RUN, SWEEP
from delaytasks.worker.broker_connection import GuardStep
from tests.fuzzing import fuzz, json_like
from tests.world import MainProcess, World

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
        self.consumer = Consumer(
            lambda *_: None, app=self.app, controller=worker, hostname="w", timer=Timer()
        )

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
        message = Message(
            body, 1, kind, "utf-8", delivery, {}, headers, "utf-8", None, Channel(), **more
        )
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
    made: list[GuardedConsumer] = []

    def make(**conf: Any) -> GuardedConsumer:
        made.append(GuardedConsumer(store, **conf))
        return made[-1]

    yield make
    for one in made:
        one.world.close()


@pytest.fixture(autouse=True)
def _forget(reader: GuardedConsumer) -> None:
    for asked in (reader.entries, reader.drained, reader.sweeps):
        asked.clear()


def test_a_token_for_another_workers_queue_is_refused(reader: GuardedConsumer) -> None:
    """In Redis the queue of a message is a field of the message."""
    before = reader.refused
    reader.read(
        json.dumps([[[], {"drain": [0]}], {}, {}]),
        delivery_info={"routing_key": "delaytasks.payments"},
    )
    assert (reader.drained, reader.refused) == ([], before + 1)


entry = st.lists(
    st.integers(-5, 9) | st.sampled_from([DUE, 2**63 - 1, 2**63, 2**70, True, 1.0, "1"]), max_size=5
)
args = st.lists(st.lists(entry, max_size=4) | json_like, max_size=3) | json_like
payload = (
    st.builds(lambda a: [a, {}, {}], args)
    | st.builds(lambda a: {"args": a, "task": RUN}, args)
    | json_like
)
body = (
    st.builds(json.dumps, payload)
    | st.builds(lambda p: json.dumps(p).encode(), payload)
    | st.binary(max_size=60)
    | st.none()
    | st.sampled_from(
        ["", "[", "[" * 100_000, "NaN", "[[[[1,0,1e400,0]]]]", "9" * 5000, pickle.dumps([[[]]])]
    )
)
header = st.dictionaries(
    st.sampled_from(
        ["task", "id", "expires", "eta", "compression", "ignore_result", "timelimit", "x"]
    ),
    json_like
    | st.sampled_from(
        [RUN, SWEEP, "no.such.task", "gzip", "9999-12-31T00:00:00", "0001-01-01", "now"]
    ),
)
headers: st.SearchStrategy[Any] = (
    st.just({"task": RUN, "id": "x"}) | st.just({"task": SWEEP, "id": "x"}) | st.just({}) | header
)
kinds = st.just("application/json") | st.sampled_from(
    [
        "application/x-python-serialize",
        "application/x-yaml",
        "application/data",
        "text/plain",
        "",
        None,
        5,
    ]
)
deliveries = st.sampled_from(
    [{"routing_key": "delaytasks.default"}, {"routing_key": "celery"}, {}, {"routing_key": 5}]
)


@fuzz(200)
@given(body, headers, kinds, deliveries)
@example(b"[]", {"task": RUN, "id": "x"}, "application/json", {})
@example(b"[]", {"task": ["unhashable"]}, "application/json", {})
@example(b"{}", {"task": "no.such.task"}, "application/json", {})
@example(
    b"[[[[1, 9223372036854775808, 0, 0]]], {}, {}]",  # a version that no row can have
    {"task": RUN, "id": "x"},
    "application/json",
    {},
)
@example(
    b"[[[], {'drain': []}]]",
    {"task": RUN, "expires": 5},
    "application/json",
    {"routing_key": ["x"]},
)
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
    assert all(
        type(queue) is str and len(priorities) <= 100 for queue, priorities, _ in reader.drained
    )
    assert all(sweep_partition in (None, 0) for sweep_partition in reader.sweeps)


@fuzz(200)
@given(payload)
def test_accepted_entries_equal_the_sent_ones(reader: GuardedConsumer, payload: Any) -> None:
    """The messages cause only their own entries, drains and sweeps."""
    _forget_now(reader)
    reader.read(json.dumps(payload))
    if reader.entries:
        sent = payload["args"] if isinstance(payload, dict) else payload[0]
        assert [[e.id, e.version, e.due_us, e.priority] for e in reader.entries] == sent[0]


def _forget_now(reader: GuardedConsumer) -> None:
    reader.entries.clear()


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
    kind, place = "application/x-python-serialize", {"routing_key": routing_key}
    message = reader.read(bomb, headers, kind, delivery_info=place)
    assert message.acknowledged
    assert (ran, reader.refused) == ([], 1)


def test_queues_of_the_app_are_read_with_the_content_types_of_the_app(
    make_reader: MakeReader,
) -> None:
    reader = make_reader(accept_content=["json", "pickle"])
    reader.consumer.task_consumer.queues.append(Queue("celery"))
    reader.read(
        pickle.dumps([1]),
        {},
        "application/x-python-serialize",
        delivery_info={"routing_key": "celery"},
    )
    assert reader.refused == 0
    reader.read(pickle.dumps([1]), {}, "application/x-python-serialize")
    assert reader.refused == 1


@pytest.mark.parametrize(
    ("accepted", "told"), [(["json"], 0), (["json", "msgpack"], 0), (["pickle", "json"], 1)]
)
def test_a_worker_reports_that_the_app_accepts_content_that_can_run_code(
    make_reader: MakeReader, accepted: Any, told: int
) -> None:
    reader = make_reader(accept_content=accepted)
    seen: list[dict[str, Any]] = []
    reader.runtime.events.subscribe(
        lambda name, fields: seen.append(fields) if name == "content.unsafe" else None
    )
    reader.world.runtime.checks.check_broker()
    assert [fields["accepts"] for fields in seen] == ["pickle"] * told


def test_messages_of_delaytasks_write_no_results_to_a_backend(make_reader: MakeReader) -> None:
    """An app has no result backend by default, and our messages do not use an app's backend."""
    assert make_reader().app.conf.result_backend is None
    backend = make_reader(result_backend="cache+memory://")
    for name in (RUN, SWEEP):
        task = backend.app.tasks[name]
        assert task.ignore_result
        assert not task.store_errors_even_if_ignored
    message = backend.read(
        json.dumps([["x"], {}, {}]), {"task": RUN, "id": "x", "ignore_result": False}
    )
    assert message.acknowledged
    assert backend.app.backend.get_state("x") == "PENDING"


# -- the transport --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no JSON"), KeyError("properties"), TypeError(), RecursionError()]
)
def test_a_message_that_the_transport_cannot_read_is_refused(
    reader: GuardedConsumer, error: Exception
) -> None:
    before = reader.refused
    assert GuardStep(reader.consumer)._guarded(raiser(error))() is None
    assert reader.refused == before + 1


def test_errors_about_a_lost_broker_or_an_empty_queue_are_raised_unchanged(
    reader: GuardedConsumer,
) -> None:
    for error in (Empty(), reader.consumer.connection_errors[0]()):
        with pytest.raises(type(error)):
            GuardStep(reader.consumer)._guarded(raiser(error))()


def raiser(error: Exception) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read
