"""The Celery app of projects that do not define one: `celery -A delaytasks.contrib.django worker`.

DJANGO_SETTINGS_MODULE names the project's settings.
"""

from __future__ import annotations

import django

from delaytasks.contrib.django.instance import project_delays
from delaytasks.runtime import runtime_of

django.setup()
app = runtime_of(project_delays()).celery
