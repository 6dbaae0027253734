"""The settings of Django projects."""

from __future__ import annotations

import importlib.util
from typing import Any

from sqlalchemy import make_url

OURS = "delaytasks.contrib.django"


def site_settings(urls: str, *apps: str, **others: Any) -> dict[str, Any]:
    """Return the settings of a project that has the admin, and `apps` of its own.

    `urls` is the module of its URLs.
    """
    contrib = ("admin", "auth", "contenttypes", "sessions", "messages")
    processors = "template.context_processors.request contrib.auth.context_processors.auth"
    processors += " contrib.messages.context_processors.messages"
    context = [f"django.{each}" for each in processors.split()]
    middleware = {"sessions": "Session", "auth": "Authentication", "messages": "Message"}
    return {
        "SECRET_KEY": "a secret of the tests",
        "ALLOWED_HOSTS": ["*"],
        "ROOT_URLCONF": urls,
        "STATIC_URL": "/static/",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "INSTALLED_APPS": [*(f"django.contrib.{name}" for name in contrib), OURS, *apps],
        "MIDDLEWARE": [
            f"django.contrib.{app}.middleware.{name}Middleware" for app, name in middleware.items()
        ],
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": context},
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
    kind = place.get_backend_name()
    engine = "sqlite3" if kind == "sqlite" else kind
    options = {"sqlite3": {"transaction_mode": "IMMEDIATE", "timeout": 20}}
    options["mysql"] = {"charset": "utf8mb4"}
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": place.database,
        "USER": place.username or "",
        "PASSWORD": place.password or "",
        "HOST": place.host or "",
        "PORT": place.port or "",
        "OPTIONS": options.get(engine, {}),
    }
