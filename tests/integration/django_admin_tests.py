"""Tests of Django's admin, which `test_django_admin.py` runs on each database.

They run in a process of their own with the settings of `django_admin_settings.py`, since Django can
be set up only once.
"""

from __future__ import annotations

import html
import re
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import include, path

from delaytasks import NewTask, Status, StoreUnavailableError
from delaytasks.contrib.django.admin import DelayTaskRowAdmin, task_counts
from delaytasks.contrib.django.admin.task_counts import count_tasks
from delaytasks.contrib.django.console import console_urls
from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.core.filters import Filter
from delaytasks.core.task import DelayTask
from delaytasks.runtime import runtime_of

plain = admin.AdminSite("plain")
plain.register(DelayTaskRow)
urlpatterns = [
    path("admin/", admin.site.urls),
    path("plain/", plain.urls),
    path("console/", include(console_urls())),
]
delays = project_delays()
TASKS = "/admin/delaytasks/delaytaskrow/"
POLICIES = "/admin/delaytasks/policyrow/"
RECURRING = "/admin/delaytasks/recurringschedulerow/"
OPERATIONS = "/admin/delaytasks/bulkoperationrow/"
HOSTILE = "<script>alert(1)</script>"


def object_of(task: DelayTask) -> Any:
    """The hook of the project: the key of an account is the name of a user."""
    if task.tag == "broken":
        raise ValueError("the hook fails")
    return {"account": User(pk=7), "page": "/orders/7", "script": "javascript:alert(1)"}.get(
        task.tag
    )


@delays.processor("fails", retries="1h")
def fail(body: Any) -> None:
    raise ValueError(f"{HOSTILE} timeout")


delays.processor("fails.finally")(fail)


@delays.recurring("0 9 * * *", name="declared")
@delays.processor("declared.report")
def report(body: Any) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def tables() -> None:
    call_command("migrate", verbosity=0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    runtime_of(delays).store.clear()
    assert not connection.in_atomic_block


def user(*permissions: str, is_superuser: bool = False) -> Client:
    """Return the browser of a new member of the staff."""
    name = secrets.token_hex(4)
    account = User.objects.create(username=name, is_staff=True, is_superuser=is_superuser)
    account.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(raise_request_exception=False)
    client.force_login(account)
    return client


def viewer() -> Client:
    return user("view_delaytaskrow")


def operator() -> Client:
    return user("view_delaytaskrow", "change_delaytaskrow")


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer
    return html.unescape(answer.content.decode())


def listed(client: Client, query: str = "") -> list[str]:
    """Return the bodies of the tasks on a page of the list."""
    ids = re.findall(r'field-id"><a href="/admin/delaytasks/delaytaskrow/(\d+)/change/',
                     text_of(client.get(TASKS + query)))  # fmt: skip
    return [delays.get(int(id)).body for id in ids]


def act(
    client: Client, action: str, *tasks: DelayTask, query: str = "", **fields: str
) -> tuple[str, str]:
    """Confirm an action, and return the question and the message after it."""
    ids = [str(task.id) for task in tasks] or ["0"]
    data = {"action": action, "_selected_action": ids, "index": "0", **fields}
    asked = client.post(TASKS + query, data)
    if asked.status_code == 302:
        return "", message_of(client)
    question = text_of(asked)
    hidden = re.findall(r'<input type="(?:hidden|text)" name="(\w+)" value="([^"]*)"', question)
    answers: dict[str, list[str]] = {}
    for name, value in hidden:
        answers.setdefault(name, []).append(value)
    answers.pop("csrfmiddlewaretoken", None)
    assert client.post(TASKS + query, {**answers, **fields}).status_code == 302
    return question, message_of(client)


def message_of(client: Client) -> str:
    found = re.search(r'<ul class="messagelist">(.*?)</ul>', text_of(client.get(TASKS)), re.DOTALL)
    assert found is not None
    return re.sub(r"<[^>]*>", "", found[1]).strip()


def status(task: DelayTask) -> Status:
    return delays.get(task).status


# -- look -----------------------------------------------------------------------------------------


def test_a_task_has_its_times_error_attempts_and_content_and_html_is_escaped() -> None:
    task = delays.schedule_delay("fails", {"card": HOSTILE}, 0, key=HOSTILE, meta={"a": "b"})
    delays.runner().run_due("default", range(10), limit=10)
    page = operator().get(f"{TASKS}{task.id}/change/")
    assert HOSTILE not in page.content.decode()
    shown = text_of(page)
    for text in ('"card": "<script>', "ValueError: <script>", "a=b", "NOT_COMPLETE"):
        assert text in shown
    assert shown.count("ValueError: <script>alert(1)</script> timeout") >= 3  # error and attempt
    assert HOSTILE not in viewer().get(TASKS).content.decode()


def test_a_user_with_only_the_view_permission_sees_no_content_and_no_actions() -> None:
    task = delays.schedule_delay("mail", {"card": 4711}, 3600, meta={"tenant": "acme"})
    for page in (TASKS, f"{TASKS}{task.id}/change/"):
        shown = text_of(viewer().get(page))
        assert "mail" in shown
        assert "cancel_tasks" not in shown
        assert "4711" not in shown
        assert "acme" not in shown
        assert "cancel_tasks" in text_of(operator().get(page))
    answer = {"action": "cancel_tasks", "_selected_action": task.id, "is_confirmed": "yes"}
    viewer().post(TASKS, {**answer, "version": f"{task.id}:{task.version}"})
    assert status(task) is Status.NOT_COMPLETE
    assert user().get(TASKS).status_code == 403


def test_filters_can_be_combined() -> None:
    delays.schedule_delay("mail", "soon", 60)
    delays.schedule_delay("mail", "later", 100 * 3600, queue="letters")
    delays.cancel(delays.schedule_delay("mail", "cancelled", 60))
    delays.schedule_delay("feed", "now", 0)
    client = viewer()
    assert listed(client) == ["later", "cancelled", "soon", "now"]
    assert listed(client, "?o=4") == ["now", "soon", "cancelled", "later"]
    assert listed(client, "?tag=feed") == ["now"]
    assert listed(client, "?queue=letters") == ["later"]
    assert listed(client, "?status=NOT_COMPLETE&due=hour") == ["soon"]
    assert listed(client, "?due=past") == ["now"]
    assert listed(client, "?due=week") == ["later", "cancelled", "soon"]
    # A wrong value leads back to the page without filters.
    assert client.get(f"{TASKS}?status=x").status_code == 302
    assert client.get(f"{TASKS}?tag=%00").status_code == 302


def test_search_finds_an_id_a_key_or_a_part_of_the_error() -> None:
    task = delays.schedule_delay("mail", "by id", 60)
    delays.schedule_delay("mail", "by key", 60, key="order-7")
    delays.schedule_delay("fails.finally", "by error", 0)
    delays.runner().run_due("default", range(10), limit=10)
    client = viewer()
    assert listed(client, f"?q={task.id}") == ["by id"]
    assert listed(client, "?q=order-7") == ["by key"]
    assert listed(client, "?q=TIMEOUT") == ["by error"]
    assert listed(client, "?q=*Value*timeout*") == ["by error"]
    assert listed(client, "?q=order-8") == []


def test_each_page_begins_after_the_last_task_of_the_page_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DelayTaskRowAdmin, "list_per_page", 2)
    delays.schedule_many([("mail", str(number), 60) for number in range(5)])
    client, query, seen = viewer(), "?tag=mail", list[str]()
    while query:
        seen += listed(client, query)
        found = re.search(r'class="delays-next" href="([^"]*)"', text_of(client.get(TASKS + query)))
        query = found[1] if found else ""
        assert not query or "tag=mail" in query
    assert sorted(seen) == ["0", "1", "2", "3", "4"]


def test_the_hook_links_the_key_to_an_object(caplog: pytest.LogCaptureFixture) -> None:
    for tag in ("account", "page", "script", "broken", "other"):
        delays.schedule_delay(tag, {}, 60, key=f"key-{tag}")
    shown = text_of(viewer().get(TASKS))
    assert '<a href="/admin/auth/user/7/change/">key-account</a>' in shown
    assert '<a href="/orders/7">key-page</a>' in shown
    for tag in ("script", "broken", "other"):
        assert f'field-key">key-{tag}<' in shown
    assert "the hook fails" in caplog.text


def test_a_large_number_of_tasks_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    delays.schedule_many([NewTask("many", number, 3600) for number in range(40)])
    many = Filter(tag="many")
    assert str(count_tasks(delays, many)) == "40"
    monkeypatch.setattr(task_counts, "MAX_EXACT_COUNT", 5)
    analyze = {"postgresql": "ANALYZE", "mysql": "ANALYZE TABLE"}.get(connection.vendor)
    if analyze is None:  # SQLite has no estimates
        assert str(count_tasks(delays, many, reads_rows=False)) == "more than 5"
    else:
        with connection.cursor() as cursor:
            cursor.execute(f"{analyze} {runtime_of(delays).store.schema.tasks.name}")
        assert re.fullmatch(r"about (3|4|5)\d", str(count_tasks(delays, many)))
        monkeypatch.setattr(task_counts, "MAX_EXACT_COUNT", 1000)
        assert str(count_tasks(delays, many)) == "40"
        assert re.fullmatch(r"about (3|4|5)\d", str(count_tasks(delays, many, reads_rows=False)))


def test_a_count_ends_where_the_estimate_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    delays.schedule_many([NewTask("many", number, 3600) for number in range(40)])
    monkeypatch.setattr(task_counts, "MAX_EXACT_COUNT", 5)
    monkeypatch.setattr(task_counts, "estimate", lambda *_: 0)
    assert str(count_tasks(delays, Filter(tag="many"))) == "more than 5"


# -- act ------------------------------------------------------------------------------------------


def test_selected_tasks_are_counted_before_an_action_and_audited_after_it() -> None:
    waits, ended = (delays.schedule_delay("mail", {}, 3600) for _ in range(2))
    delays.cancel(ended)
    question, message = act(operator(), "cancel_tasks", waits, ended)
    assert "Cancel: 1 task<" in question
    assert "1 of the selected tasks will not change" in question
    assert "1 task is cancelled." in message
    assert status(waits) is Status.CANCELLED
    [entry] = delays.audit()
    assert (entry.action, entry.filter["ids"]) == ("cancel_tasks", [waits.id])


@pytest.mark.parametrize(
    ("action", "delay", "due_in_s"), [("run_tasks_now", "", 0), ("reschedule_tasks", "2h", 7200)]
)
def test_tasks_are_run_now_or_rescheduled(action: str, delay: str, due_in_s: float) -> None:
    task = delays.schedule_delay("mail", {}, 3600)
    act(operator(), action, task, **({"delay": delay} if delay else {}))
    due_in = delays.get(task).due - runtime_of(delays).clock.now()
    assert abs(due_in - timedelta(seconds=due_in_s)) < timedelta(seconds=30)


def test_ended_tasks_run_again_and_the_page_of_the_task_follows() -> None:
    client, task = operator(), delays.schedule_delay("mail", {}, 3600)
    delays.cancel(task)
    page = text_of(client.get(f"{TASKS}{task.id}/change/"))
    assert re.findall(r'name="action" value="(\w+)"', page) == ["rerun_tasks"]
    act(client, "rerun_tasks", task, page="task")
    assert status(task) is Status.NOT_COMPLETE
    assert "Run again." in text_of(client.get(f"{TASKS}{task.id}/history/"))


def test_a_task_that_moved_after_the_question_is_left_as_it_is() -> None:
    client, task = operator(), delays.schedule_delay("mail", {}, 3600)
    version = f"{task.id}:{task.version}"
    delays.reschedule(task, 7200)
    answer = {"action": "cancel_tasks", "_selected_action": task.id, "is_confirmed": "yes"}
    client.post(TASKS, {**answer, "version": version})
    assert "0 tasks are cancelled. 1 refused" in message_of(client)
    assert status(task) is Status.NOT_COMPLETE


def test_an_action_reaches_all_filtered_tasks_with_a_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DelayTaskRowAdmin, "list_per_page", 2)
    delays.schedule_many([("mail", {}, 3600)] * 5)
    other = delays.schedule_delay("feed", {}, 3600)
    client = user(is_superuser=True)
    question, message = act(client, "cancel_tasks", query="?tag=mail", select_across="1")
    assert re.search(r"Cancel: (about )?\d+ tasks<", question)
    assert "5 tasks are cancelled." in message
    assert len(delays.find(tag="mail", status="CANCELLED")) == 5
    assert status(other) is Status.NOT_COMPLETE
    [entry] = delays.audit()
    assert entry.actor == User.objects.get(pk=client.session["_auth_user_id"]).username


def test_an_action_on_all_tasks_requires_a_filter_that_its_move_allows() -> None:
    task, client = delays.schedule_delay("mail", {}, 3600), operator()
    question, message = act(client, "cancel_tasks", select_across="1")
    assert not question
    assert "Choose a filter first" in message
    query = "?status=NOT_COMPLETE"
    assert "Rerun is for" in act(client, "rerun_tasks", query=query, select_across="1")[1]
    assert status(task) is Status.NOT_COMPLETE


def test_wrong_answers_change_nothing() -> None:
    client, task = operator(), delays.schedule_delay("mail", {}, 3600)
    assert "is not a delay" in act(client, "reschedule_tasks", task, delay="soon")[1]
    for version in ("x", "1", f"{task.id}:-1", f"{task.id}:²"):
        answer = {"action": "cancel_tasks", "_selected_action": task.id, "is_confirmed": "yes"}
        assert client.post(TASKS, {**answer, "version": version}).status_code == 302
    assert client.get(f"{TASKS}x/change/").status_code == 302
    assert delays.get(task).version == 0


def test_no_row_can_be_written_even_where_the_model_is_registered_plainly() -> None:
    task, client = delays.schedule_delay("mail", {}, 3600), user(is_superuser=True)
    row = DelayTaskRow.objects.get()
    fields = {f.name: "1" for f in DelayTaskRow._meta.fields} | {"tag": "changed", "status": "0"}
    for name in [f.name for f in DelayTaskRow._meta.fields if f.name.endswith(("time", "until"))]:
        if name != "delay_time":
            fields |= {f"{name}_0": "2030-01-01", f"{name}_1": "00:00"}
    for site in ("admin", "plain"):
        pages = f"/{site}/delaytasks/delaytaskrow/"
        for address in (f"{task.id}/delete/", f"{task.id}/change/", "add/"):
            answer = client.post(pages + address, {**fields, "post": "yes", "id": "7"})
            assert answer.status_code == 403, (site, address)
    assert DelayTaskRow.objects.get() == row
    assert delays.get(task).tag == "mail"


# -- policies -------------------------------------------------------------------------------------


def test_policies_are_added_changed_and_cleared() -> None:
    client = user("view_policyrow", "change_policyrow")
    new = {"kind": "tag", "name": "mail.send", "concurrency": "5", "rate_limit": "100/s"}
    assert client.post(f"{POLICIES}add/", new).status_code == 302
    [policy] = delays.policies(tag="mail.send")
    assert (policy.concurrency, policy.rate_text, policy.is_paused) == (5, "100/s", False)
    queue = {"kind": "queue", "name": "mail.send", "is_paused": "on"}
    assert client.post(f"{POLICIES}add/", queue).status_code == 302
    assert delays.policies(queue="mail.send")[0].is_paused
    shown = text_of(client.get(POLICIES))
    page = f"{POLICIES}tag_3Amail.send/"
    assert page in shown
    assert 'value="100/s"' in text_of(client.get(f"{page}change/"))
    client.post(f"{page}change/", {"concurrency": "", "rate_limit": "30/m", "is_paused": "on"})
    [policy] = delays.policies(tag="mail.send")
    assert (policy.concurrency, policy.rate_text, policy.is_paused) == (None, "30/m", True)
    assert client.post(f"{page}delete/", {"post": "yes"}).status_code == 302
    assert [policy.kind for policy in delays.policies()] == ["queue"]


def test_a_policy_that_could_not_be_written_is_reported() -> None:
    client = user("view_policyrow", "change_policyrow")
    away = StoreUnavailableError("the database is away")
    with patch.object(type(delays), "set_policy", side_effect=away):
        given = {"kind": "tag", "name": "mail.send", "concurrency": "5"}
        shown = text_of(client.post(f"{POLICIES}add/", given, follow=True))
    assert "The policy may not have been changed completely: the database is away" in shown
    assert delays.policies() == []


def test_a_wrong_policy_is_refused_with_the_reason() -> None:
    client = user("view_policyrow", "change_policyrow")
    for wrong, reason in (
        ({"rate_limit": "often"}, "a rate is a number of starts"),
        ({"kind": "queue", "concurrency": "5"}, "limits are for tags"),
        ({"name": " "}, "This field is required"),
    ):
        given = {"kind": "tag", "name": "mail", **wrong}
        assert reason in text_of(client.post(f"{POLICIES}add/", given))
    looks = user("view_policyrow")
    assert looks.get(POLICIES).status_code == 200
    assert looks.post(f"{POLICIES}add/", {"kind": "tag", "name": "mail"}).status_code == 403
    assert delays.policies() == []


# -- recurring schedules --------------------------------------------------------------------------

NIGHTLY = {
    "name": "nightly", "tag": "mail", "body": '{"a": 1}', "timing": "0 2 * * *",
    "tz": "Europe/Berlin", "jitter_s": "0", "most_missed": "100", "priority": "0",
    "missed": "latest", "overlap": "skip",
}  # fmt: skip


def test_schedules_are_added_changed_paused_and_removed() -> None:
    client = user("view_recurringschedulerow", "change_recurringschedulerow")
    assert client.post(f"{RECURRING}add/", NIGHTLY).status_code == 302
    stored = delays.recurring.get("nightly")
    assert (stored.tag, stored.body, stored.tz) == ("mail", {"a": 1}, "Europe/Berlin")
    page = f"{RECURRING}nightly/"
    assert "next occurrences" in text_of(client.get(f"{page}change/")).lower()
    changed = {**NIGHTLY, "timing": "every 5m", "is_paused": "on"}
    assert client.post(f"{page}change/", changed).status_code == 302
    stored = delays.recurring.get("nightly")
    assert (stored.timing, stored.is_paused) == ("every 300", True)
    assert stored.updated_by != ""
    wrong = text_of(client.post(f"{page}change/", {**NIGHTLY, "timing": "99 * * * *"}))
    assert "errornote" in wrong
    assert delays.recurring.get("nightly") == stored
    assert client.post(f"{page}delete/", {"post": "yes"}).status_code == 302
    assert delays.recurring.list() == []


def test_a_change_keeps_the_options_that_the_form_does_not_have() -> None:
    options: Any = {"retries": "15s 3m", "expires": 60, "meta": {"a": "b"}, "concurrency_key": "k"}
    before = delays.recurring.set("nightly", "mail", {"a": 1}, cron="0 1 * * *", **options)
    client = user("view_recurringschedulerow", "change_recurringschedulerow")
    assert client.post(f"{RECURRING}nightly/change/", NIGHTLY).status_code == 302
    after = delays.recurring.get("nightly")
    assert after.timing == "0 2 * * *"
    for name in ("headers_json", "meta", "concurrency_key"):
        assert getattr(after, name) == getattr(before, name)


def test_a_declared_schedule_can_only_be_paused_and_run() -> None:
    delays.recurring.follow_code()
    client = user("view_recurringschedulerow", "change_recurringschedulerow")
    page = f"{RECURRING}declared/"
    assert 'name="timing"' not in text_of(client.get(f"{page}change/"))
    assert client.post(f"{page}change/", {**NIGHTLY, "is_paused": "on"}).status_code == 302
    stored = delays.recurring.get("declared")
    assert (stored.tag, stored.is_paused) == ("declared.report", True)
    assert client.post(f"{page}delete/", {"post": "yes"}).status_code == 403
    for action in ("resume", "run_now"):
        client.post(RECURRING, {"action": action, "_selected_action": "declared", "index": "0"})
    assert not delays.recurring.get("declared").is_paused
    assert len(delays.find(tag="declared.report", status="NOT_COMPLETE", until=None)) >= 1
    looks = user("view_recurringschedulerow")
    assert 'name="is_paused"' not in text_of(looks.get(f"{page}change/"))


# -- the console ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [None, {}, {"is_staff": True, "is_active": False}])
def test_the_console_is_not_for_others_than_staff(flags: dict[str, bool] | None) -> None:
    client = Client()
    if flags is not None:
        account = User.objects.create(username=secrets.token_hex(4))
        client.force_login(account)
        User.objects.filter(pk=account.pk).update(**flags or {"is_staff": False})
    assert client.get("/console/").status_code == 401
    assert client.get("/console/tasks").status_code == 401


@pytest.mark.parametrize(("is_superuser", "role"), [(False, "view"), (True, "admin")])
def test_staff_can_view_the_console_and_superusers_can_change_policies(
    is_superuser: bool, role: str
) -> None:
    client = user(is_superuser=is_superuser)
    text = text_of(client.get("/console/policies"))
    assert f'<span class="chip">{role}</span>' in text
    token = re.findall(r'name="csrf" value="([^"]+)"', text)[0]
    data = {"csrf": token, "kind": "tag", "name": "mail", "concurrency": "3"}
    answer = client.post("/console/policies/limits", data)
    assert answer.status_code == (303 if is_superuser else 403)
    assert len(delays.policies()) == int(is_superuser)
