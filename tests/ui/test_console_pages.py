"""The pages of the console, and the actions of their forms."""

from __future__ import annotations

import html
import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaytasks.console import pages
from delaytasks.console.pages import SEARCH_S
from delaytasks.console.viewers import Role
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import UTC
from delaytasks.model.text import installed_version
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.why import why
from delaytasks.recurring.definition import DEFINED
from delaytasks.recurring.recurring import follow
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, chart_titles, fill, make_delays, post
from tests.world import RUNNING
from tests.world.recording import set_columns

PAGES = "/ /tasks /tags /failures /recurring /policies /queues /workers /audit".split()


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
    text = client.get("/workers").text
    assert re.findall(r'data-label="Busy" class="num">([^<]*)<', text) == ["1 of 8", "2 of 8"]
    assert re.findall(r'data-label="Version">([^<]*)<', text) == [installed_version()] * 2
    assert "Stop or restart a worker where it runs" in text
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


def test_tasks_are_found_by_a_part_of_the_error_by_pages_and_by_id(site: Site) -> None:
    client = site.client()
    for error, count in (("TEMPLATE+FOR+ORDER+904", 1), ("*no template for order*", 9)):
        text = client.get(f"/tasks?error={error}").text
        assert len(re.findall("<tr data-row>", text)) == count, error
    seen: list[str] = []
    path: str | None = "/tasks?tag=order.close&order=oldest"
    while path is not None:
        text = client.get(path).text
        seen += re.findall(r'href="/tasks/(\d+)"', text)
        following = re.search(r'<a rel="next" href="([^"]+)"', text)
        path = None if following is None else html.unescape(following[1])
    assert seen == [str(task.id) for task in site.delays.find(tag="order.close", limit=1000)]
    assert client.get(f"/tasks?id={seen[0]}").location == f"/tasks/{seen[0]}"
    assert '<span class="status waiting">waiting</span>' in text
    assert client.get("/tasks?id=x").status_code == 400
    assert client.get("/tasks?id=").status_code == 200


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
    since, times = (
        r"the server of its timer since .*?(\d\d):\d\d {} \(2h\)",
        ServiceTimes(None, 7200),
    )
    workers = runtime_of(delays).store.workers
    workers.report("celery@a", ["default"], "prefork", 2, 0, services=times)
    [utc] = re.findall(since.format("UTC"), client.get("/").text)
    at = failed.update_time
    assert at is not None
    page = client.get(f"/tasks/{failed.id}").text
    assert f"It failed at {at:%Y-%m-%d %H:%M:%S} UTC: " in page
    assert f">{failed.due:%Y-%m-%d %H:%M:%S} UTC" in page
    assert ">UTC</text>" in client.get("/").text
    post(client, "/preferences", zone="Asia/Tokyo")
    assert post(client, "/preferences", zone="Nowhere/At_All").status_code == 303
    assert "times are in Asia/Tokyo" in client.get("/").text
    [jst] = re.findall(since.format("JST"), client.get("/").text)
    assert (int(utc) + 9) % 24 == int(jst)
    local = at + timedelta(hours=9)
    page = client.get(f"/tasks/{failed.id}").text
    assert f"It failed at {local:%Y-%m-%d %H:%M:%S} JST: " in page
    assert f">{failed.due + timedelta(hours=9):%Y-%m-%d %H:%M:%S} JST" in page
    assert "until: 2030-02-01 03:00:00 JST" in client.get("/audit").text
    text = client.get("/").text
    assert text.count(">JST</text>") >= 2
    assert ">UTC</text>" not in text


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


# -- actions --------------------------------------------------------------------------------------


def test_a_notice_says_what_was_done_to_a_task(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    task = delays.find(tag="order.close", status="NOT_COMPLETE").tasks[0]
    page = f"/tasks/{task.id}"
    answer = post(client, "/do/cancel", id=task.id, version=task.version, next=page)
    assert (answer.status_code, answer.location) == (303, page)
    text = client.get(page).text
    assert re.search(r"The task was cancelled at \d\d:\d\d:\d\d UTC\.<", text)
    post(client, "/do/rerun", id=task.id, delay="2h", next=page)
    due = delays.get(task.id).due
    said = client.get(page).text
    assert "The task was rerun at " in said
    assert f", and is due at {due:%Y-%m-%d %H:%M:%S} UTC.<" in said
    post(client, "/do/cancel", id=task.id, version=0)
    assert 'class="notice bad"' in client.get("/").text


def test_the_page_of_a_task_names_no_command_that_viewers_may_call_otherwise(site: Site) -> None:
    client = site.client(Role.VIEW)
    for status in ("FAILED", "CANCELLED", "NOT_COMPLETE"):
        [task, *_] = site.delays.find(status=status).tasks
        assert re.search(": delaytasks ", why(runtime_of(site.delays), task)[0].text)
        assert not re.search(": delaytasks ", client.get(f"/tasks/{task.id}").text)


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "1" * 5000, "x", "-1"])
def test_a_text_that_is_no_number_is_refused(site: Site, number: str) -> None:
    client = site.client()
    assert client.get(f"/tasks/{number}").status_code == 400
    assert client.get(f"/audit/{number}").status_code == 400
    assert post(client, "/do/rerun", entry=number).status_code == 400
    for fields in ({"version": number}, {}):
        assert post(client, "/do/cancel", id=number, **fields).status_code == 303


def test_the_end_of_a_pause_is_shown_and_viewers_have_no_forms(own_site: Site) -> None:
    own_site.delays.policies.pause(tag="order.close", until="2h")
    [policy] = own_site.delays.policies.list(tag="order.close")
    until = f"{policy.paused_until:%Y-%m-%d %H:%M:%S} UTC"
    for page in ("/policies", "/tag?name=order.close"):
        text = own_site.client(Role.ADMIN).get(page).text
        assert "</span> until <time" in text
        assert until in text
        assert 'action="/do/resume"' in text
        assert "/do/" not in own_site.client(Role.VIEW).get(page).text


# -- the forms of recurring schedules and of limits -----------------------------------------------


def form_of(text: str, action: str = "/do/recurring-set") -> dict[str, str]:
    """Return what a browser sends if a viewer changes nothing in the form of this action."""
    [form] = re.findall(
        rf'<form method="post" action="{action}" class="fields".*?</form>', text, re.DOTALL
    )
    fields: dict[str, str] = {}
    for field in re.findall(r"<input[^>]*>", form):
        [name] = re.findall(r' name="(\w+)"', field)
        [fields[name], *_] = re.findall(r' value="([^"]*)"|$', field)
    for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', form):
        [fields[name], *_] = re.findall(r"<option selected>(\w+)|$", options)
    fields |= re.findall(r'<textarea name="(\w+)"[^>]*>(.*?)</textarea>', form, re.DOTALL)
    return {name: html.unescape(value) for name, value in fields.items()}


@pytest.mark.parametrize("timing", [{"cron": "0 3 * * *", "tz": "Asia/Tokyo"}, {"every": "5m"}])
def test_a_schedule_is_changed_in_one_field_only(own_site: Site, timing: dict[str, Any]) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    rules = {"jitter": "10s", "missed": "all", "overlap": "skip"}
    options = {"queue": "mail", "priority": 3, "retries": "15s 3m", "max_late": 60}
    options |= {"limit_key": "k", "meta": {"tenant": "acme"}, "body_version": 3}
    body = {"order": 1, "text": "</textarea>é"}
    recurring.set("nightly", "order.close", body, **timing, **rules, **options)  # type: ignore[arg-type]
    stored = recurring.get("nightly")
    fields = form_of(client.get("/recurring?name=nightly").text)
    client.post("/do/recurring-set", data=fields)
    assert recurring.get("nightly") == stored
    client.post("/do/recurring-set", data={**fields, "queue": "reports"})
    changed = recurring.get("nightly")
    assert changed.queue == "reports"
    for name in set(DEFINED) - {"queue"}:
        assert getattr(changed, name) == getattr(stored, name), name
    client.post("/do/recurring-set", data={**fields, "body": " ", "overlap": "allow"})
    assert (recurring.get("nightly").body, recurring.get("nightly").overlap) == (body, "allow")
    client.post("/do/recurring-set", data={**fields, "body": '{"order": 2}', "retries": ""})
    changed = recurring.get("nightly")
    assert changed.body == {"order": 2}
    assert json.loads(changed.headers_json or "").keys() == {"max_late_s", "body_version"}


def test_the_form_is_for_schedules_that_can_change_and_replaces_no_other(own_site: Site) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    fields = form_of(client.get("/recurring").text)
    fields |= {"name": "feeds", "tag": "report.build", "cron": "0 4 * * *"}
    client.post("/do/recurring-set", data=fields)
    assert "there is a schedule feeds already" in client.get("/recurring").text
    assert recurring.get("feeds").tag == "feed.read"
    client.post("/do/recurring-set", data={**fields, "name": ""})
    assert "the name is missing" in client.get("/recurring").text

    @own_site.delays.recurring("0 9 * * *", name="declared")
    @own_site.delays.processor("declared.report")
    def report(body: Any) -> None: ...

    follow(runtime_of(own_site.delays))
    text = own_site.client(Role.ADMIN).get("/recurring").text
    assert "<code>every 5m</code>" in text
    assert re.findall(r'href="/recurring\?name=([\w-]+)#edit"', text) == ["feeds", "report-nightly"]
    assert "name=feeds#edit" not in own_site.client(Role.OPERATE).get("/recurring").text
    client = own_site.client(Role.ADMIN)
    assert form_of(client.get("/recurring?name=gone").text)["name"] == ""
    assert client.get("/recurring?after=%00").status_code == 400


LIMITS = "/do/limit"


def limits(site: Site, tag: str) -> Any:
    [policy] = site.delays.policies.list(tag=tag)
    return policy.concurrency, policy.concurrency_per_key, policy.rate_text


def test_administrators_change_limits_one_by_one(own_site: Site) -> None:
    assert "/policies?tag=" not in own_site.client(Role.OPERATE).get("/policies").text
    client = own_site.client(Role.ADMIN)
    assert form_of(client.get("/policies?tag=gone").text, LIMITS)["tag"] == ""
    [link] = re.findall(r'href="(/policies\?tag=[^"]*)"', client.get("/policies").text)
    assert link == "/policies?tag=pay.notify#edit", "mail.send is paused and has no limits"
    fields = form_of(client.get(link).text, LIMITS)
    client.post(LIMITS, data=fields)
    assert limits(own_site, "pay.notify") == (10, None, "100/s")
    client.post(LIMITS, data={**fields, "concurrency": "20"})
    assert limits(own_site, "pay.notify") == (20, None, "100/s")
    client.post(LIMITS, data={**fields, "rate": "none"})
    assert limits(own_site, "pay.notify") == (10, None, None)
    new = form_of(client.get("/policies").text, LIMITS)
    client.post(LIMITS, data={**new, "tag": "pay.notify", "concurrency_per_key": "1"})
    assert limits(own_site, "pay.notify") == (10, 1, None), "those without a value stay"
    client.post(LIMITS, data={**new, "tag": "mail.send"})
    assert "no limit was named" in client.get("/policies").text
