"""Sets Django up with its admin. A plugin of pytest, imported before the modules of the tests."""

from __future__ import annotations

import os

import django
from celery import Celery
from django.conf import settings

from tests.integration import django_settings

TESTS = "tests.integration.django_admin_tests"
app = Celery("shop")
app.conf.broker_url = "memory://"
django_settings.replace_mysqlclient()
settings.configure(
    SECRET_KEY="a secret of the tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=TESTS,
    STATIC_URL="/static/",
    DATABASES={
        "default": {
            **django_settings.database_entry(os.environ["ADMIN_DATABASE_URL"]),
            # Each view is a transaction, with which the actions must not collide.
            "ATOMIC_REQUESTS": True,
        }
    },
    INSTALLED_APPS=[
        *(f"django.contrib.{name}" for name in "auth contenttypes sessions messages admin".split()),
        "delaytasks.contrib.django",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    DELAYTASKS={
        "celery_app": f"{__name__}.app",
        "strict_tags": False,
        "object_of": f"{TESTS}.object_of",
    },
    USE_TZ=True,
)
django.setup()
