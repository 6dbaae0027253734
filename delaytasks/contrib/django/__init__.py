"""The Django app: put `delaytasks.contrib.django` into INSTALLED_APPS. See docs/django.md.

`celery -A delaytasks.contrib.django worker` serves projects that do not define a Celery app.
DJANGO_SETTINGS_MODULE names the project's settings.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Make the Celery app of the project when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import django

    from delaytasks.contrib.django.instance import project_delays
    from delaytasks.runtime import runtime_of

    django.setup()
    return runtime_of(project_delays()).celery
