"""The standalone Celery app, for `celery -A delaytasks worker`, configured by `celeryconfig.py`."""

from __future__ import annotations

import importlib.util
import os
import sys

from celery import Celery

from delaytasks.attachment import file_broker_url
from delaytasks.client import DelayTasks
from delaytasks.settings import load_settings


def _make_app() -> Celery:
    made = Celery("delaytasks", set_as_current=False)
    # The command `celery` too finds a celeryconfig.py in the current directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
    if importlib.util.find_spec(module) is not None:
        made.config_from_object(module)
    return made


class _StandaloneDelays(DelayTasks):
    _tables_remedy = (
        "run: delaytasks db upgrade (this process has made no other DelayTasks: if your project "
        "has one, import its module first)"
    )


app = _make_app()
#: The instance of a process without another Celery app.
delays = _StandaloneDelays(app)
if not app.conf.broker_url:
    # Not `delays.settings`, which would make a timer, and that needs a broker.
    app.conf.broker_url = file_broker_url(load_settings(app.conf, os.environ).data_dir)
