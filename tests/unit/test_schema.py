"""A processor's schema converts valid bodies and refuses invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from delaytasks.core.errors import BodyNotJSONError, BodyRefusedError
from delaytasks.core.states import Status
from tests.conftest import open_store
from tests.recording import RunnerHarness, counted


@dataclass
class Order:
    number: int
    note: str = ""


class Model:
    """A class with the interface of pydantic's models, because the tests do not need pydantic."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def model_validate(cls, body: Any) -> Model:
        return cls(int(body["number"]))

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"number": self.number}


def even(body: int) -> int:
    if body % 2:
        raise ValueError(f"{body} is odd")
    return body


@pytest.fixture
def bench(sqlite_path: Callable[[], str]) -> Iterator[RunnerHarness]:
    made = RunnerHarness(open_store(sqlite_path()))
    yield made
    made.store.close()


def takes(bench: RunnerHarness, tag: str, schema: Callable[..., Any], **options: Any) -> list[Any]:
    given: list[Any] = []
    bench.registry.processor(tag, schema=schema, **options)(lambda body: given.append(body))
    return given


@pytest.mark.parametrize(
    ("schema", "body", "given"),
    [
        (Order, {"number": 7}, Order(7)),
        (Order, Order(7, "x"), Order(7, "x")),
        (even, 4, 4),
        (lambda body: body["n"], {"n": 1}, 1),
    ],
)
def test_a_processor_receives_the_body_converted_by_its_schema(
    bench: RunnerHarness, schema: Any, body: Any, given: Any
) -> None:
    seen = takes(bench, "order", schema)
    bench.run(bench.schedule("order", body))
    assert seen == [given]


def test_a_model_is_stored_as_it_dumps_itself_and_read_again(bench: RunnerHarness) -> None:
    seen = takes(bench, "order", Model)
    task = bench.schedule("order", Model(7))
    assert task.body == {"number": 7}
    bench.run(task)
    assert seen[0].number == 7


def test_a_dataclass_needs_no_schema_to_be_scheduled(bench: RunnerHarness) -> None:
    assert bench.schedule("note", Order(7)).body == {"number": 7, "note": ""}
    with pytest.raises(BodyNotJSONError):
        bench.schedule("note", Order)


@pytest.mark.parametrize(
    ("schema", "body"),
    [(Order, {"nummer": 7}), (Order, [7]), (Order, None), (even, 3), (even, "x"), (Model, {})],
)
def test_a_body_that_is_refused_is_not_scheduled(
    bench: RunnerHarness, schema: Any, body: Any
) -> None:
    takes(bench, "order", schema)
    with pytest.raises(BodyRefusedError, match="refuses the body of a task of tag 'order'"):
        bench.schedule("order", body)
    assert not any(counted(bench.store).values())


def test_a_body_that_the_schema_refuses_fails_without_a_retry(
    bench: RunnerHarness,
) -> None:
    task = bench.schedule("order", {"nummer": 7})
    seen = takes(bench, "order", Order, retries="10s 10s")
    bench.run(task)
    assert (seen, bench.now(task).status) == ([], Status.FAILED)
    assert "BodyRefusedError: Order refuses" in (bench.now(task).error or "")
