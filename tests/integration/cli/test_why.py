"""The commands `show`, `status` and `check` explain why tasks have not run."""

from __future__ import annotations

import re
from typing import Any

from delaytasks.core.interfaces import Entry
from delaytasks.core.task import DelayedTask
from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from tests.integration.cli.project import Project
from tests.recording import runner_of, set_columns


def overdue(shop: Project, tag: str = "ok", **options: Any) -> DelayedTask:
    task = shop.schedule(tag, **options)
    set_columns(shop.store, "tasks", {"id": task.id}, expected_time=db_now_plus(-90))
    return task


def deferred(shop: Project) -> DelayedTask:
    task = overdue(shop, "gone")
    runner_of(shop.delays).run([Entry(task.id, 0, 0)])
    assert shop.delays.get(task).expected_time > runtime_of(shop.delays).clock.now()
    return task


def test_show_begins_with_each_reason_and_its_remedy(shop: Project) -> None:
    task = overdue(shop, key="k1")
    [reason] = shop.json("show", str(task.id))["why"]
    assert reason["code"] == "no_worker"
    shop("pause", "--tag", "ok", "--actor", "ann")
    said = shop("show", str(task.id)).stdout.splitlines()
    assert said[0] == f"task {task.id} (ok): NOT_COMPLETE"
    assert said[1].startswith("The tag ok is paused by ann since 20")
    assert said[2] == f"  → To resume it: delaytasks -A {shop.name} resume --tag ok"
    assert said[3].startswith("No live worker serves the queue default")
    paused, no_worker = shop.json("show", "--tag", "ok", "--key", "k1")["why"]
    assert (paused["code"], paused["facts"]["actor"]) == ("paused", "ann")
    assert no_worker["code"] == "no_worker"


def test_a_key_of_no_live_task_names_the_last_task_that_had_it(shop: Project) -> None:
    older = shop.schedule(key="k1", delay=3600)
    shop.delays.cancel(older)
    newer = shop.schedule(key="k1", delay=60)
    shop.delays.cancel(newer)
    found = shop.json("show", "--tag", "ok", "--key", "k1")
    assert (found["id"], found["status"]) == (str(newer.id), "CANCELLED")
    error = shop.error("show", "--tag", "ok", "--key", "k2", exit_code=1)
    assert error["type"] == "TaskNotFoundError"
    live = shop.schedule(key="k1", delay=30)
    assert shop.json("show", "--tag", "ok", "--key", "k1")["id"] == str(live.id)


def test_each_hint_repeats_how_the_user_called(shop: Project) -> None:
    task = overdue(shop)
    worker = f"celery -A {shop.name} worker"
    assert shop.json("show", str(task.id))["why"][0]["remedy"] == f"Start a worker: {worker}"
    assert f"start one with: {worker}" in shop("status").stdout
    assert f"delaytasks -A {shop.name} show 2305843009213693952" in shop("show", "--help").stdout
    shop.store.schema.metadata.drop_all(shop.store.database.tx)
    assert f"run: delaytasks -A {shop.name} db upgrade\n" in shop("list").stderr


def test_show_of_a_deferred_task_has_its_due_time_and_the_next_try(shop: Project) -> None:
    shop.store.workers.report("w", ["default"], "prefork", 2, 0, ["ok"])
    task = deferred(shop)
    shown = shop.json("show", str(task.id))
    assert shown["due_time"] < shown["expected_time"]
    assert [each["code"] for each in shown["why"]] == ["no_processor"]
    said = shop("show", str(task.id)).stdout
    assert re.search(r"(?m)^due_time .* ago\)$", said)
    assert re.search(r"(?m)^It was due 1m3\ds ago, and no worker could run it: no such proc", said)


def test_list_has_the_due_time_of_a_deferred_task_and_not_its_next_try(shop: Project) -> None:
    task = deferred(shop)
    assert re.search(rf"^{task.id} .* 1m3\ds ago", shop("list").stdout, re.MULTILINE)


def test_stats_names_the_queue_and_the_tag_of_late_tasks(shop: Project) -> None:
    deferred(shop)
    for _ in range(2):
        overdue(shop, "mail")
    shop.store.workers.report("w", ["default"], "prefork", 2, 0, ["ok"])
    found = shop.json("status")
    assert found["overdue"]["count"] == 3
    late = [(each["queue"], each["tag"], each["tasks"], each["code"]) for each in found["late"]]
    assert late == [("letters", "mail", 2, "no_worker"), ("default", "gone", 1, "no_processor")]
    assert all(89 < each["late_s"] < 120 for each in found["late"])
    assert found["workers"][0]["tags"] == ["ok"]
    said = shop("status").stdout
    for pattern in (
        r"letters +mail +2 +1m3\ds +No live worker serves the queue letters",
        r"default +gone +1 +1m3\ds +No worker of the queue default has a processor",
    ):
        assert re.search(f"(?m)^{pattern}", said)


def test_stats_names_a_deferral_though_no_worker_publishes_its_tags(shop: Project) -> None:
    deferred(shop)
    shop.store.workers.report("w", ["default"], "prefork", 2, 0)
    [late] = shop.json("status")["late"]
    assert (late["code"], late["tag"]) == ("no_processor", "gone")
    assert shop.json("status")["workers"][0]["tags"] is None


def test_check_names_the_queue_and_warns_without_a_failure(shop: Project) -> None:
    overdue(shop, "mail")
    found = shop.json("check")
    [warning] = found["warnings"]
    late = "1 late task of the tag mail in the queue letters: No live worker serves the queue"
    assert warning.startswith(late)
    assert "warning: 1 late task of the tag mail" in shop("check").stdout
    deferred(shop)
    [finding] = shop.json("check", exit_code=1)["findings"]
    assert (finding["tag"], finding["queues"]) == ("gone", ["default"])
    assert finding["problem"] == "no processor"


def test_tasks_that_only_wait_for_a_free_worker_cause_no_warning(shop: Project) -> None:
    overdue(shop)
    shop.store.workers.report("w", ["*"], "prefork", 2, 0, ["ok"])
    assert shop.json("check")["warnings"] == []
    assert [each["code"] for each in shop.json("status")["late"]] == ["due"]
