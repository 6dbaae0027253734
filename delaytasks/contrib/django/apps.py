"""The app configuration for INSTALLED_APPS."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig

from delaytasks.celery import set_project_delays
from delaytasks.contrib.django.checks import register_checks
from delaytasks.contrib.django.instance import project_delays


class DelayTasksConfig(AppConfig):
    name = "delaytasks.contrib.django"
    label = "delaytasks"
    verbose_name = "Delayed tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before Django imports any models.py, which may register processors.
        set_project_delays(project_delays())

    def ready(self) -> None:
        project_delays().import_processors()
        register_checks()
