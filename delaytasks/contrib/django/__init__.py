"""The Django app: put `delaytasks.contrib.django` into INSTALLED_APPS. See docs/django.md.

`celery -A delaytasks.contrib.django worker` serves projects that do not define a Celery app.
DJANGO_SETTINGS_MODULE names the project's settings.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Make the Celery app of the project when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import os
    import sys

    import django

    from delaytasks.contrib.django.instance import project_delays
    from delaytasks.runtime import runtime_of

    # The command `celery` has this folder on the path only while it imports a module.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    django.setup()
    return runtime_of(project_delays()).celery
