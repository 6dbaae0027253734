"""For projects without a Celery app of their own: `celery -A delaytasks.contrib.django worker`, where
DJANGO_SETTINGS_MODULE names the project's settings."""

from __future__ import annotations

import django

from delaytasks.contrib.django.instance import project_delays

django.setup()
app = project_delays().celery
