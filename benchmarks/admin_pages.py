"""Reads the pages of Django's admin: `python -m benchmarks.admin_pages TURNS FAILED_ID KEY`.

The tables of Django itself are in memory. The last line is `measured` and a JSON object with the
milliseconds that each page took.
"""

from __future__ import annotations

import json
import sys
from urllib.parse import quote

import django
from celery import Celery
from django.conf import settings

from benchmarks.ours import TAG
from benchmarks.page_times import page_times
from benchmarks.settings import NAMESPACES, TABLE_PREFIX, broker_url, database_url
from tests.django_site import database_entry, site_settings

TASKS = "/admin/delaytasks/delaytaskrow/"

app = Celery("bench_admin", broker=broker_url(), set_as_current=False)
settings.configure(
    **site_settings(
        __name__,
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
            "tasks": database_entry(database_url()),
        },
        DELAYTASKS={
            "celery_app": f"{__name__}.app",
            "database": "tasks",
            "namespace": NAMESPACES["eta"],
            "table_prefix": TABLE_PREFIX,
        },
    )
)
django.setup()

# Django's models can be imported only now.
from django.contrib import admin  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.test import Client  # noqa: E402
from django.urls import path  # noqa: E402

urlpatterns = [path("admin/", admin.site.urls)]


def pages_of(failed_id: str, key: str) -> dict[str, str]:
    """Return the address of each page by its name."""
    return {
        "admin": "/admin/",
        "admin: tasks": TASKS,
        "admin: tasks, the first due first": f"{TASKS}?o=5",
        "admin: tasks that wait": f"{TASKS}?status=NOT_COMPLETE",
        "admin: finished tasks": f"{TASKS}?status=DONE",
        "admin: tasks of a tag": f"{TASKS}?tag={TAG}",
        "admin: search for an id": f"{TASKS}?q={failed_id}",
        "admin: search for a key": f"{TASKS}?q={quote(key)}",
        "admin: search for an error": f"{TASKS}?q=is+not+paid",
        "admin: one task": f"{TASKS}{failed_id}/change/",
    }


def read(client: Client, address: str) -> None:
    answer = client.get(address)
    if answer.status_code != 200:
        raise SystemExit(f"{address} answered with {answer.status_code}")


def main() -> None:
    turns, failed_id, key = sys.argv[1:]
    call_command("migrate", database="default", verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    pages = pages_of(failed_id, key)
    print(
        "measured",
        json.dumps(page_times(pages, int(turns), lambda name: read(client, pages[name]))),
    )


if __name__ == "__main__":
    main()
