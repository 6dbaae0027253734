"""The pages of the console, and the actions of their forms."""

from __future__ import annotations

import html
import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.console import pages
from delaytasks.console.pages import SEARCH_S
from delaytasks.console.viewers import Role
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import UTC
from delaytasks.model.text import installed_version
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.why import why
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, chart_titles, fill, make_delays, post
from tests.world import RUNNING
from tests.world.recording import set_columns

PAGES = "/ /tasks /tags /failures /forecast /recurring /policies /queues /workers /audit".split()


def heading(text: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", text, re.DOTALL)
    assert found is not None
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", found[1]))).strip()


# -- pages ----------------------------------------------------------------------------------------


def test_all_pages_work_on_each_database(database_url: str) -> None:
    site = Site(make_delays(database_url, table_prefix="console_"))
    fill(site.delays)
    client = site.client()
    task = site.delays.find(status="FAILED").tasks[0]
    more = "/tasks?error=template /?period=two+days /tags?period=day /tag?name=order.close"
    for path in (*PAGES, f"/tasks/{task.id}", *more.split()):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "cannot be read" not in answer.text, path
        assert answer.text.count("<h1") == 1, path
        assert answer.text.rstrip().endswith("</html>"), path
    titles = chart_titles(client.get("/?period=hour").text, charts=3)
    assert re.search(r"UTC: done \d+, retried \d+, failed \d+", titles)
    assert re.search(r"p99: 99 of 100 began earlier \d{3}ms", titles)
    text = client.get("/").text
    assert heading(text) == "! On time, but 14 tasks failed."
    assert re.search(r"9 tasks of report\.build have failed since .*no template", text)
    assert "The tag mail.send is paused by maria" in text
    store = runtime_of(site.delays).store
    store.schema.metadata.drop_all(store.database.tx)
    site.delays.close()


def test_tasks_that_are_due_soon_are_read_from_a_limited_number_of_queues(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = make_delays(f"sqlite:///{tmp_path / 'queues.sqlite3'}")
    for number in range(4):
        delays.schedule_delay("order.close", {}, 90, queue=f"queue-{number}")
    store = runtime_of(delays).store
    assert sum(pages.count_due(store, store.database.now())) == 4
    monkeypatch.setattr(pages, "MOST_QUEUES", 3)
    assert sum(pages.count_due(store, store.database.now())) == 3
    delays.close()


def test_the_address_of_the_list_with_an_id_leads_to_the_task(site: Site) -> None:
    client, [task, *_] = site.client(), site.delays.find(limit=1)
    assert client.get(f"/tasks?id={task.id}").location == f"/tasks/{task.id}"
    assert client.get("/tasks?id=x").status_code == 400
    assert client.get("/tasks?id=").status_code == 200


def test_tasks_are_filtered_and_paged_by_the_address(site: Site) -> None:
    client = site.client()
    counts = {
        "status=FAILED&tag=report.build": 9,
        "error=TEMPLATE+FOR+ORDER+904": 1,
        "error=*no template for order*": 9,
        "error=nothing like this": 0,
        "key=order-7": 1,
        "key_prefix=report-": 9,
        "meta=tenant%3Dacme": 4,
        "queue=feeds&status=CANCELLED": 3,
    }
    for query, count in counts.items():
        text = client.get(f"/tasks?{query}").text
        assert len(re.findall("<tr data-row>", text)) == count, query
    seen: list[str] = []
    path: str | None = "/tasks?tag=order.close&order=oldest"
    while path is not None:
        text = client.get(path).text
        seen += re.findall(r'href="/tasks/(\d+)"', text)
        following = re.search(r'<a rel="next" href="([^"]+)"', text)
        path = None if following is None else html.unescape(following[1])
    wanted = [str(task.id) for task in site.delays.find(tag="order.close", limit=1000)]
    assert seen == wanted


@pytest.mark.parametrize(
    "query", ["since=yesterday", "status=ASLEEP", "cursor=%00", "meta=x", "tag=" + "x" * 200]
)
def test_a_wrong_filter_is_explained(site: Site, query: str) -> None:
    answer = site.client().get(f"/tasks?{query}")
    assert answer.status_code == 200
    assert 'role="alert"' in answer.text


def test_a_slow_search_asks_to_narrow_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def find(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        raise SearchTimeoutError("the search took longer than 5 s: narrow its filter")

    monkeypatch.setattr(pages, "find_tasks", find)
    client = site.client()
    for path in ("/tasks?tag=nothing", "/tasks?error=timeout", "/bulk?action=cancel&tag=nothing"):
        answer = client.get(path)
        assert "narrow its filter" in answer.text, path
        assert answer.status_code == (503 if "bulk" in path else 200)
    [group, *_] = re.findall(r'href="(/failures/\w+)"', client.get("/failures").text)
    assert "narrow its filter" in client.get(group).text
    assert all(0 < limit_s <= SEARCH_S for limit_s in limits)


def test_times_reasons_and_charts_are_in_the_zone_of_the_viewer(own_site: Site) -> None:
    client, delays = own_site.client(), own_site.delays
    failed = delays.find(status="FAILED", tag="report.build").tasks[0]
    until = datetime(2030, 1, 31, 18, tzinfo=UTC)
    delays.bulk.cancel(tag="order.close", until=until)
    at = failed.update_time
    assert at is not None
    page = client.get(f"/tasks/{failed.id}").text
    assert f"It failed at {at:%Y-%m-%d %H:%M:%S} UTC: " in page
    assert f">{failed.due:%Y-%m-%d %H:%M:%S} UTC" in page
    assert ">UTC</text>" in client.get("/").text
    post(client, "/preferences", zone="Asia/Tokyo")
    post(client, "/preferences", zone="Nowhere/At_All")
    assert "times are in Asia/Tokyo" in client.get("/").text
    local = at + timedelta(hours=9)
    page = client.get(f"/tasks/{failed.id}").text
    assert f"It failed at {local:%Y-%m-%d %H:%M:%S} JST: " in page
    assert f">{failed.due + timedelta(hours=9):%Y-%m-%d %H:%M:%S} JST" in page
    assert "until: 2030-02-01 03:00:00 JST" in client.get("/audit").text
    for path in ("/", "/forecast"):
        text = client.get(path).text
        assert text.count(">JST</text>") >= 2, path
        assert ">UTC</text>" not in text, path


def test_the_timeline_of_a_task_names_its_delay_or_recurring_schedule(own_site: Site) -> None:
    delays = own_site.delays
    delays.recurring.set("hourly", "order.close", {"order": 1}, every="1h")

    def life(task: Any) -> str:
        text = own_site.client(Role.VIEW).get(f"/tasks/{task.id}").text
        [events] = re.findall(r'<ol class="timeline">(.*?)</ol>', text, re.DOTALL)
        return re.sub(r"<[^>]*>|\s+", " ", events)

    made = life(delays.recurring.schedule_now("hourly"))
    assert re.search("Scheduled by the recurring schedule hourly +for now ", made)
    task = delays.schedule_delay("order.close", {"order": 1}, 60)
    assert re.search("Scheduled +with a delay of 1m ", life(task))
    alike = delays.schedule_delay("order.close", {"order": 1}, 60, key="gone@2030-01-31T18:00:00Z")
    assert "recurring" not in life(alike)


def test_the_timeline_ends_with_what_happened_last_or_comes_next(own_site: Site) -> None:
    delays = own_site.delays
    running, due = delays.find(tag="order.close", status="NOT_COMPLETE").tasks[:2]
    set_columns(runtime_of(delays).store, "tasks", {"id": running.id}, **RUNNING)
    set_columns(runtime_of(delays).store, "tasks", {"id": due.id}, expected_time=db_now_plus(-9))
    last = {
        running.id: "running future: Its lease ends, unless it is renewed",
        due.id: "waiting future: Due: waits for a worker",
    }
    for filters, event in (
        ({"status": "DONE"}, r"done: Done after \d+m?s"),
        ({"status": "FAILED", "tag": "report.build"}, "failed: Attempt 1 failed on .* after .*"),
        ({"status": "CANCELLED"}, "cancelled: Cancelled"),
        ({"key": "retrying", "tag": "pay.notify"}, "waiting future: Retry 1"),
        ({"tag": "feed.read", "status": "NOT_COMPLETE"}, "waiting future: Due"),
    ):
        last[delays.find(**filters).tasks[0].id] = event  # type: ignore[arg-type]
    for id, event in last.items():
        text = own_site.client(Role.VIEW).get(f"/tasks/{id}").text
        found = re.findall('<li class="([^"]*)"><span class="when">.*?</span>(<str.*?)</li>', text)
        shown = [re.sub("<[^>]*>", " ", f"{kind}: {words}") for kind, words in found]
        *_, end = (" ".join(each.split()) for each in shown)
        assert re.match(event, end), end


def test_the_page_of_workers_shows_their_load_and_their_version(site: Site) -> None:
    text = site.client().get("/workers").text
    assert re.findall(r'data-label="Busy" class="num">([^<]*)<', text) == ["1 of 8", "2 of 8"]
    assert re.findall(r'data-label="Version">([^<]*)<', text) == [installed_version()] * 2
    assert "Stop or restart a worker where it runs" in text


# -- actions --------------------------------------------------------------------------------------


def test_a_task_is_cancelled_run_again_and_rescheduled(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    task = delays.find(tag="order.close", status="NOT_COMPLETE").tasks[0]
    page = f"/tasks/{task.id}"

    def do(action: str, **fields: Any) -> Any:
        version = delays.get(task.id).version
        return post(client, f"/do/{action}", id=task.id, version=version, next=page, **fields)

    answer = do("cancel")
    assert (answer.status_code, answer.location) == (303, page)
    assert re.search(r"The task was cancelled at \d\d:\d\d:\d\d UTC\.<", client.get(page).text)
    assert delays.get(task.id).status is Status.CANCELLED
    assert re.search(r"It was cancelled at .* by maria \(entry \d+", client.get(page).text)
    do("rerun")
    assert delays.get(task.id).status is Status.NOT_COMPLETE
    assert "The task was rerun at " in client.get(page).text
    do("reschedule", delay="2h")
    assert (
        f", and is due at {delays.get(task.id).due:%Y-%m-%d %H:%M:%S} UTC.<"
        in client.get(page).text
    )
    due = delays.get(task.id).due - runtime_of(delays).clock.now()
    assert timedelta(minutes=119) < due <= timedelta(hours=2)
    do("reschedule", delay="0")
    assert delays.get(task.id).due <= runtime_of(delays).clock.now()
    entries = [entry for entry in delays.bulk.log() if entry.filter.get("id") == str(task.id)]
    actions = [entry.action for entry in entries]
    assert actions == ["reschedule_task", "reschedule_task", "rerun_task", "cancel_task"]


def test_the_page_of_a_task_names_no_command_that_viewers_may_call_otherwise(site: Site) -> None:
    client = site.client(Role.VIEW)
    for status in ("FAILED", "CANCELLED", "NOT_COMPLETE"):
        [task, *_] = site.delays.find(status=status).tasks
        assert re.search(": delaytasks ", why(runtime_of(site.delays), task)[0].text)
        assert not re.search(": delaytasks ", client.get(f"/tasks/{task.id}").text)


def test_a_task_that_moved_meanwhile_is_left_alone(own_site: Site) -> None:
    client, delays = own_site.client(), own_site.delays
    task = delays.find(tag="order.close", status="NOT_COMPLETE").tasks[0]
    delays.reschedule(task, 5000)
    post(client, "/do/cancel", id=task.id, version=task.version)
    assert delays.get(task.id).status is Status.NOT_COMPLETE
    assert delays.bulk.log()[0].state == "failed"
    assert 'class="notice bad"' in client.get("/").text


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "1" * 5000, "x", "-1"])
def test_a_text_that_is_no_number_is_refused(site: Site, number: str) -> None:
    client = site.client()
    assert client.get(f"/tasks/{number}").status_code == 400
    assert client.get(f"/audit/{number}").status_code == 400
    assert post(client, "/do/rerun", entry=number).status_code == 400
    for fields in ({"version": number}, {}):
        assert post(client, "/do/cancel", id=number, **fields).status_code == 303


def test_tags_are_paused_limited_and_resumed(own_site: Site) -> None:
    client, delays = own_site.client(Role.ADMIN), own_site.delays

    def policy() -> Any:
        return next(iter(delays.policies.list(tag="order.close")), None)

    post(client, "/do/pause", tag="order.close")
    assert policy().is_paused
    assert policy().updated_by == "maria"
    post(client, "/do/resume", tag="order.close")
    post(client, "/do/pause", tag="order.close", until="2h")
    until = f"{policy().paused_until:%Y-%m-%d %H:%M:%S} UTC"
    for page in ("/policies", "/tag?name=order.close"):
        assert "</span> until <time" in (text := client.get(page).text)
        assert until in text
    assert 'action="/do/resume"' in text
    viewer = own_site.client(Role.VIEW)
    assert "/do/" not in viewer.get(page).text
    client = own_site.client(Role.ADMIN)
    post(client, "/do/resume", tag="order.close")
    post(client, "/do/limit", tag="order.close", concurrency="3", rate="5/s")
    assert (policy().concurrency, policy().rate_text) == (3, "5/s")
    post(client, "/do/limit", tag="order.close", concurrency="many")
    assert policy().concurrency == 3
    post(client, "/do/limit", tag="order.close", remove="1")
    assert policy() is None
