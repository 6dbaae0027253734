"""Test Django's admin: a superuser sees tasks and cannot change them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("django")

SITE = """
import django
from celery import Celery
from django.conf import settings

app = Celery("shop", broker="memory://")
settings.configure(
    SECRET_KEY="x" * 50,
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF="__main__",
    STATIC_URL="/static/",
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {path!r}}}}},
    INSTALLED_APPS=["django.contrib." + name for name in "auth contenttypes sessions messages \
admin".split()]
    + ["delaytasks.contrib.django"],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {{"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]}},
    }}],
    USE_TZ=True,
)
django.setup()

from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client
from django.urls import path

from delaytasks import get, schedule_delay
from delaytasks.contrib.django.admin import DelayTaskRowAdmin
from delaytasks.contrib.django.models import DelayTaskRow

admin.site.register(DelayTaskRow, {admin})
urlpatterns = [path("admin/", admin.site.urls)]
call_command("migrate", verbosity=0)
client = Client()
client.force_login(User.objects.create_superuser("root"))
task = schedule_delay("mail", {{}}, 3600)
LIST = "/admin/delaytasks/delaytaskrow/"
ROW = LIST + str(task.id)
"""

LOOK = """
assert list(Permission.objects.filter(codename__endswith="delaytaskrow").values_list("codename", \
flat=True)) == [
    "view_delaytaskrow"
]
assert client.get(LIST).status_code == client.get(ROW + "/change/").status_code == 200
"""

REFUSED = """
row = DelayTaskRow.objects.get()
fields = {f.name: f.value_to_string(row) for f in DelayTaskRow._meta.fields \
if f.value_from_object(row) is not None}
fields["due_time"] = fields["expected_time"]
for name in ("expected_time", "create_time", "update_time", "due_time"):
    if name in fields:
        fields[name + "_0"], fields[name + "_1"] = fields.pop(name)[:19].split("T")
fields.update(tag="changed", ip_address="1")
fields.update(dict.fromkeys(
    ["headers", "worker", "task_key", "error_stack", "result", "concurrency_key", "meta"], "x"
))
fields["cancel_request"] = "1"
fields.update({"execution_time_0": "2030-01-01", "execution_time_1": "00:00", \
"lease_until_0": "2030-01-01"})
fields["lease_until_1"] = "00:00"
everything = {"action": "delete_selected", "_selected_action": str(task.id), "post": "yes"}
answers = [
    client.post(ROW + "/delete/", {"post": "yes"}),
    client.post(ROW + "/change/", fields),
    client.post(LIST + "add/", {**fields, "id": "7"}),
]
assert [answer.status_code for answer in answers] == [403] * 3, answers
"""

ACTION = """
assert client.post(LIST, everything).status_code == 403
"""

SAME = """
assert get(task).tag == "mail" and get(task).version == 0 and DelayTaskRow.objects.count() == 1
"""

NO_BUTTONS = """
page = client.get(ROW + "/change/").content.decode()
assert "mail" in page and "_save" not in page and "deletelink" not in page
assert LIST + "add/" not in client.get(LIST).content.decode()
client.post(LIST, everything)
"""


def run(tmp_path: Path, admin: str, code: str) -> None:
    script = SITE.format(path=str(tmp_path / "shop.sqlite3"), admin=admin) + code
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_row_that_is_registered_plainly_is_refused_and_not_a_server_error(tmp_path: Path) -> None:
    run(tmp_path, "None", LOOK + REFUSED + ACTION + SAME)


@pytest.mark.quick
def test_the_admin_that_is_brought_along_offers_nothing_that_would_be_refused(
    tmp_path: Path,
) -> None:
    run(tmp_path, "DelayTaskRowAdmin", LOOK + REFUSED + NO_BUTTONS + SAME)
