"""Sets Django up with its admin. A plugin of pytest, imported before the modules of the tests."""

from __future__ import annotations

import os

import django
from celery import Celery
from django.conf import settings

from tests.django_site import database_entry, replace_mysqlclient, site_settings

TESTS = "tests.integration.django_admin_tests"
app = Celery("shop")
app.conf.broker_url = "memory://"
replace_mysqlclient()
database = database_entry(os.environ["ADMIN_DATABASE_URL"])
settings.configure(
    **site_settings(
        TESTS,
        # Each view is a transaction, with which the actions must not collide.
        DATABASES={"default": {**database, "ATOMIC_REQUESTS": True}},
        DELAYTASKS={"celery_app": f"{__name__}.app", "tags": "any"},
    )
)
django.setup()
