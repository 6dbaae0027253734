"""A small shop. `SHOP_DATABASE_URL` and `CELERY_BROKER_URL` configure its servers."""

import os
from pathlib import Path

from sqlalchemy import make_url

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only for this example")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
WSGI_APPLICATION = "shop.wsgi.application"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
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
]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "delaytasks.contrib.django",
    "orders",
]

_ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}
_place = make_url(os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{BASE_DIR / 'shop.sqlite3'}"))
if _place.get_backend_name() == "mysql":
    import pymysql  # Django asks for mysqlclient; this takes its place where it is not installed

    pymysql.install_as_MySQLdb()
DATABASES = {
    "default": {
        "ENGINE": f"django.db.backends.{_ENGINES[_place.get_backend_name()]}",
        "NAME": _place.database,
        "USER": _place.username or "",
        "PASSWORD": _place.password or "",
        "HOST": _place.host or "",
        "PORT": _place.port or "",
        # SQLite: writers wait for each other, instead of failing when two of them meet.
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20}
        if _place.get_backend_name() == "sqlite"
        else {},
    }
}

CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

DELAYTASKS = {"namespace": os.environ.get("SHOP_NAMESPACE", "shop")}
#: For the tasks of `django.tasks`, such as orders/tasks.py.
TASKS = {"default": {"BACKEND": "delaytasks.contrib.django.tasks_backend.DelayTasksBackend"}}

#: An order that is not paid by then is closed.
SHOP_PAY_WITHIN_S = float(os.environ.get("SHOP_PAY_WITHIN_S", "2"))
