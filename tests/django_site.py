"""The settings of Django projects."""

from __future__ import annotations

import importlib.util
from typing import Any

from sqlalchemy import make_url


def site_settings(urls: str, *apps: str, **others: Any) -> dict[str, Any]:
    """Return the settings of a project that has the admin, and `apps` of its own.

    `urls` is the module of its URLs.
    """
    contrib = ("admin", "auth", "contenttypes", "sessions", "messages")
    context_processors = [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
    return {
        "SECRET_KEY": "a secret of the tests",
        "ALLOWED_HOSTS": ["*"],
        "ROOT_URLCONF": urls,
        "STATIC_URL": "/static/",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "INSTALLED_APPS": [
            *(f"django.contrib.{name}" for name in contrib),
            "delaytasks.contrib.django",
            *apps,
        ],
        "MIDDLEWARE": [
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": context_processors},
            }
        ],
        **others,
    }


def replace_mysqlclient() -> None:
    """Let Django use PyMySQL if mysqlclient is not installed."""
    if importlib.util.find_spec("MySQLdb") is None:
        import pymysql

        pymysql.install_as_MySQLdb()


def database_entry(url: str) -> dict[str, Any]:
    """Return the entry of the setting DATABASES for a SQLAlchemy URL."""
    place = make_url(url)
    engine = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}[
        place.get_backend_name()
    ]
    options = {
        "sqlite3": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        "mysql": {"charset": "utf8mb4"},
    }
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": place.database,
        "USER": place.username or "",
        "PASSWORD": place.password or "",
        "HOST": place.host or "",
        "PORT": place.port or "",
        "OPTIONS": options.get(engine, {}),
    }
