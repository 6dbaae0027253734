"""Run the Python blocks of a page in an empty folder: `python -m tests.doc_runner PAGE`.

The setups of a page may use `database_url`, `make_tables` and `django_project`.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from celery import Celery

from delaytasks import current_delays
from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings
from tests.django_site import site_settings
from tests.doc_pages import blocks

#: The pages use this URL for the reader's own database.
DATABASE_URL = r"postgresql(\+psycopg2)?://localhost/shop"
_MODELS = """
from django.db import models


class Order(models.Model):
    status = models.CharField(max_length=10, default="placed")
"""

_DJANGO = site_settings(
    "docs",  # the names of the page
    "orders",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
)


def run_page(page: Path) -> None:
    """Execute the page's blocks in order, as one module whose name is `docs`."""
    url, loop = os.environ["DELAYTASKS_DATABASE_URL"], asyncio.new_event_loop()
    sys.modules["docs"] = ModuleType("docs")
    names = vars(sys.modules["docs"])
    names |= {"database_url": url, "make_tables": make_tables, "django_project": django_project}
    for block in blocks(page):
        if block.runs:
            # Empty lines before the block make tracebacks show the page's line numbers.
            text = "\n" * (block.line - 1) + re.sub(DATABASE_URL, url, block.text)
            code = compile(text, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
            if inspect.iscoroutine(awaits := eval(code, names)):
                loop.run_until_complete(awaits)
            load_settings(names, {})  # the names that begin as settings do are settings
    loop.close()


def make_tables(delays: Any = None) -> None:
    migrations.upgrade(runtime_of(delays or current_delays()).store.database)


def django_project(**settings: Any) -> Any:
    """Set Django up with the admin, the app `orders` and the page as URLs, and return the model."""
    import django
    from django.conf import settings as django_settings
    from django.core.management import call_command

    Path("orders").mkdir()
    Path("orders/__init__.py").touch()
    Path("orders/models.py").write_text(_MODELS)
    importlib.invalidate_caches()
    del os.environ["DELAYTASKS_DATABASE_URL"]  # it would win over Django's database
    Celery("project")  # is the current app from now on, instead of one that the page has made
    django_settings.configure(**{**_DJANGO, **settings})
    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
    return importlib.import_module("orders.models").Order


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
