"""Meta: pairs of strings that are stored with a task and found again, on each database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, text

from delaytasks import DelayTask, DelayTasks, InvalidMetaError, NewTask
from delaytasks.core.filters import filter_of
from delaytasks.storage.store import Store
from tests.conformance.query_plans import plans
from tests.recording import RecordingTimer, RunnerHarness

QUOTES = {"note": 'say "tenant":"acme" }', "z": "\\"}


def test_the_pairs_of_a_task_are_stored_and_read_again(delays: DelayTasks) -> None:
    pairs = {"tenant": "acme", "trace": "00-ab-01", "name": "Ä \U0001f600 \x00"}
    task = delays.schedule_delay("mail", {}, 60, meta=pairs)
    assert task.meta == delays.get(task).meta == pairs
    assert task.as_json()["meta"] == pairs
    assert delays.get(delays.schedule_delay("mail", {}, 60)).meta == {}
    assert delays.get(delays.schedule_delay("mail", {}, 60, meta={})).meta_json is None


def test_many_tasks_and_replacements_have_meta(delays: DelayTasks) -> None:
    delays.schedule_many(NewTask("mail", n, 60, meta={"n": str(n % 3)}) for n in range(9))
    assert len(delays.find(meta={"n": "1"})) == 3
    first = delays.schedule_delay("mail", 1, 60, key="k", meta={"v": "1"})
    options: Any = {"key": "k", "on_conflict": "replace"}
    assert delays.schedule_delay("mail", 2, 60, meta={"v": "2"}, **options).id == first.id
    assert delays.get(first).meta == {"v": "2"}


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({"tenant": "acme"}, "acme both"),
        ({"tenant": "acme", "plan": "big"}, "both"),
        ({"plan": "big", "tenant": "acme"}, "both"),
        ({"tenant": "Acme"}, ""),
        ({"tenant": "acm"}, ""),
        ({"enant": "acme"}, ""),
        ({"tenant": 'ac"me'}, "odd"),
        (QUOTES, "quotes"),
        ({"note": QUOTES["note"]}, "quotes"),
        ({"z": "\\"}, "quotes"),
    ],
)
def test_tasks_are_found_by_pairs_exactly(
    delays: DelayTasks, meta: dict[str, str], wanted: str
) -> None:
    pairs: dict[str, Any] = {
        "none": None,
        "acme": {"tenant": "acme"},
        "both": {"tenant": "acme", "plan": "big", "a": ""},
        "odd": {"tenant": 'ac"me'},
        "quotes": QUOTES,
    }
    tasks = {name: delays.schedule_delay("mail", name, 60, meta=m) for name, m in pairs.items()}
    assert sorted(task.body for task in delays.find(meta=meta)) == sorted(wanted.split())
    assert delays.cancel_many(meta=meta).changed == len(wanted.split())
    cancelled = {name for name, task in tasks.items() if delays.get(task).is_finished}
    assert cancelled == set(wanted.split())
    if delays.audit():
        assert delays.audit(limit=1)[0].filter == {"meta": meta}


def test_the_processor_and_the_events_have_the_meta(bench: RunnerHarness) -> None:
    seen: list[dict[str, str]] = []
    events: list[dict[str, Any]] = []
    bench.events.subscribe(lambda name, fields: events.append({"name": name, **fields}))

    def work(body: Any, task: DelayTask) -> None:
        seen.append(task.meta)
        raise ValueError("no")

    bench.registry.processor("mail")(work)
    task = bench.producer.schedule(NewTask("mail", {}, 0, meta={"t": "a"}), "reject", None)
    bench.run(task)
    assert seen == [{"t": "a"}]
    assert [e["name"] for e in events if e.get("meta") == {"t": "a"}] == [
        "task.scheduled",
        "task.failed",
    ]


@pytest.mark.parametrize(
    "meta",
    [
        "tenant",
        {"": "a"},
        {"a b": "c"},
        {"a": 1},
        {1: "a"},
        {"a": "x" * 513},
        {str(n): "x" for n in range(17)},
        {str(n): "x" * 512 for n in range(9)},
    ],
)
def test_meta_of_another_form_is_refused(delays: DelayTasks, meta: Any) -> None:
    with pytest.raises(InvalidMetaError):
        delays.schedule_delay("mail", {}, 60, meta=meta)
    assert len(delays.find()) == 0


@pytest.mark.parametrize("stored", ["", "{}", "[1]", "not JSON", '{"a": 1, "b": "c"}'])
def test_meta_that_another_program_stored_is_readable(
    store: Store, delays: DelayTasks, timer: RecordingTimer, stored: str
) -> None:
    row = {"tag": "mail", "message_body": "{}", "meta": stored}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(row))
    [task] = delays.find()
    assert task.meta == ({"b": "c"} if "b" in stored else {})
    assert len(delays.find(meta={"b": "c"})) == 0, "it has blanks, or no such pair"


#: The statement in docs/operations.md.
INDEX = (
    "CREATE INDEX idx_meta ON s_yb_delay_task_message USING gin "
    """(string_to_array(left(right(meta, -2), -2), '","')) WHERE meta IS NOT NULL"""
)


def test_the_index_of_the_documentation_serves_the_filter(store: Store, delays: DelayTasks) -> None:
    if not store.database.can.text_arrays:
        return  # the other databases read rows in the order of their due times
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    assert " ".join(INDEX.replace("s_yb", "yb").split()) in " ".join(page.split())
    delays.schedule_many(NewTask("mail", n, 60, meta={"tenant": f"t{n}"}) for n in range(5000))
    with store.database.auto.connect() as connection:
        connection.execute(text(INDEX))
        connection.execute(text("ANALYZE s_yb_delay_task_message"))
    shown = plans(store, lambda: store.tasks.find(filter_of({"meta": {"tenant": "t77"}}), 100))
    assert "idx_meta" in shown, shown
    assert [task.body for task in delays.find(meta={"tenant": "t77"})] == [77]
