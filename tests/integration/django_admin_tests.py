"""Tests of Django's admin, which `test_django_shop.py` runs on two databases.

They run in a process of their own with the settings of `django_admin_settings.py`, since Django can
be set up only once.
"""

from __future__ import annotations

import html
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import include, path

from delaytasks import Status
from delaytasks.console.application import make_console
from delaytasks.contrib.django import mount, staff_viewer
from delaytasks.contrib.django.admin import DelayTaskRowAdmin
from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.model.moves import MOVES
from delaytasks.model.task import DelayedTask
from delaytasks.operate.operations import OPERATIONS
from delaytasks.runtime import runtime_of
from tests.integration.operation_examples import EXAMPLES, Example, arrange, changes, state_of
from tests.world.recording import runner_of

delays = project_delays()
console = make_console(delays, staff_viewer, secret_key="a secret")
plain = admin.AdminSite("plain")
plain.register(DelayTaskRow)
urlpatterns = [path("admin/", admin.site.urls), path("plain/", plain.urls)]
urlpatterns += [path("console/", include(mount(console)))]
TASKS = "/admin/delaytasks/delaytaskrow/"
HOSTILE = "<script>alert(1)</script>"


@delays.processor("fails", retries="1h")
def fail(body: Any) -> None:
    raise ValueError(f"{HOSTILE} timeout")


delays.processor("fails.finally")(fail)


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
    client: Client, action: str, *tasks: DelayedTask, query: str = "", **fields: str
) -> tuple[str, str]:
    """Confirm an action, and return the question and the message after it."""
    ids = [str(task.id) for task in tasks] or ["0"]
    data = {"action": action, "_selected_action": ids, "index": "0", **fields}
    asked = client.post(TASKS + query, data)
    if asked.status_code == 302:
        return "", message_of(client)
    question = text_of(asked)
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', question)
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


def confirm(client: Client, task: DelayedTask, asked_at: str) -> Any:
    """Answer the question about a cancellation."""
    answer = {"action": "cancel", "_selected_action": task.id, "asked_at": asked_at}
    return client.post(TASKS, answer)


def now() -> str:
    return runtime_of(delays).store.database.now().isoformat()


def status(task: DelayedTask) -> Status:
    return delays.get(task).status


# -- look -----------------------------------------------------------------------------------------


def test_a_task_has_its_times_error_attempts_and_content_and_html_is_escaped() -> None:
    task = delays.schedule_delay("fails", {"card": HOSTILE}, 0, key=HOSTILE, meta={"a": "b"})
    runner_of(delays).run_due("default", range(10), limit=10)
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
        assert 'value="cancel"' not in shown
        assert "4711" not in shown
        assert "acme" not in shown
        assert 'value="cancel"' in text_of(operator().get(page))
    confirm(viewer(), task, now())
    assert status(task) is Status.NOT_COMPLETE
    assert user().get(TASKS).status_code == 403


def test_filters_and_searches_find_tasks_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = delays.schedule_delay("mail", "soon", 60, key="order-7")
    delays.schedule_delay("mail", "later", 100 * 3600)
    delays.cancel(delays.schedule_delay("mail", "cancelled", 60))
    delays.schedule_delay("fails.finally", "failed", 0)
    runner_of(delays).run_due("default", range(10), limit=10)
    client = viewer()
    assert listed(client) == ["later", "cancelled", "soon", "failed"]
    assert listed(client, "?o=4") == ["failed", "soon", "cancelled", "later"]
    assert listed(client, "?tag=fails.finally") == ["failed"]
    assert listed(client, "?status=NOT_COMPLETE&tag=mail") == ["later", "soon"]
    searches = {str(soon.id): ["soon"], "order-7": ["soon"], "TIMEOUT": ["failed"], "order-8": []}
    for search, found_bodies in searches.items():
        assert listed(client, f"?q={search}") == found_bodies
    assert client.get(f"{TASKS}?status=x").status_code == 302, "to the page without filters"
    monkeypatch.setattr(DelayTaskRowAdmin, "list_per_page", 2)
    query, seen = "?tag=mail", list[str]()
    while query:
        seen += listed(client, query)
        found = re.search(r'class="delays-next" href="([^"]*)"', text_of(client.get(TASKS + query)))
        query = found[1] if found else ""
        assert not query or "tag=mail" in query
    assert seen == ["later", "cancelled", "soon"]


# -- act ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.filters], ids=str)
def test_an_action_has_the_effect_that_the_operation_has_on_each_face(example: Example) -> None:
    arrange(delays)
    filters: dict[str, Any] = {**example.filters}
    before, client = state_of(delays), operator()
    # The actions run CANCELLED tasks again, too, if they are selected.
    if example.operation == "rerun":
        filters.setdefault("status", "FAILED")
    if "meta" in filters:
        filters["meta"] = dict([filters["meta"].split("=")])
    tasks = delays.find(**filters).tasks
    question, message = act(client, example.operation, *tasks, **example.typed)
    count, done = len(example.effect), OPERATIONS[example.operation].done
    assert f"{example.operation.capitalize()}: {count} task<" in question
    left = len(tasks) - count
    assert not left or f"{left} of the selected tasks will not change" in question
    assert message.startswith(f"{count} task was {done}.")
    assert changes(before, state_of(delays)) == example.effect
    entry = delays.bulk.log()[0]
    user = User.objects.order_by("-pk")[0].get_username()
    assert (entry.action, entry.actor, entry.state) == (example.operation, user, "done")
    page = text_of(client.get(f"{TASKS}{tasks[0].id}/change/"))
    offered = re.findall(r'name="action" value="(\w+)"', page)
    assert offered == [name for name in ("cancel", "reschedule", "rerun")
                       if delays.get(tasks[0]).status in MOVES[name].sources]  # fmt: skip


def test_a_task_that_moved_after_the_question_is_left_as_it_is() -> None:
    client, task = operator(), delays.schedule_delay("mail", {}, 3600)
    asked_at = now()
    delays.reschedule(task, 7200)
    confirm(client, task, asked_at)
    assert "0 tasks were cancelled. 1 moved in the meantime" in message_of(client)
    assert "Delay is a duration" in act(client, "reschedule", task, delay="soon")[1]
    for asked_at in ("", "x", "1"):
        assert confirm(client, task, asked_at).status_code == 302
    assert (status(task), delays.get(task).version) == (Status.NOT_COMPLETE, 1)


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


# -- the console ----------------------------------------------------------------------------------


def test_staff_can_view_the_console_and_superusers_change_it() -> None:
    for account in (None, {"is_staff": False}, {"is_staff": True, "is_active": False}):
        client = Client()
        if account is not None:
            of = User.objects.create(username=secrets.token_hex(4))
            client.force_login(of)
            User.objects.filter(pk=of.pk).update(**account)
        assert client.get("/console/tasks").status_code == 401
    for is_superuser, role, code in ((False, "view", 403), (True, "admin", 303)):
        client = user(is_superuser=is_superuser)
        text = text_of(client.get("/console/policies"))
        assert f'<span class="chip">{role}</span>' in text
        token = re.findall(r'name="csrf" value="([^"]+)"', text)[0]
        data = {"csrf": token, "tag": "mail", "concurrency": "3"}
        assert client.post("/console/do/limit", data).status_code == code
        assert len(delays.policies.list()) == int(is_superuser)
