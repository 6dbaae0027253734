"""The Celery app that `celery -A delaytasks worker` finds: configured by `celeryconfig.py`, if there is one."""

from __future__ import annotations

import importlib.util
import os
import sys

from celery import Celery

from delaytasks.app import DelayTasks
from delaytasks.core.settings import load_settings
from delaytasks.embedded import use_embedded_broker


def _make_app() -> Celery:
    made = Celery("delaytasks", set_as_current=False)
    # As `celery` itself does: a celeryconfig.py where the command is started counts.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
    if importlib.util.find_spec(module) is not None:
        made.config_from_object(module)
    return made


app = _make_app()
#: What the module-level functions of `delaytasks` use.
delays = DelayTasks(app)
if not app.conf.broker_url:
    # Not by `delays.settings`: a timer may be made with them, and needs a broker.
    use_embedded_broker(app, load_settings(app.conf, os.environ).data_dir)
