"""Which versions of Celery this code works with."""

from __future__ import annotations

import celery

from delaytasks.core.errors import ConfigError

OLDEST_CELERY = (5, 5)


def check_celery() -> None:
    """`ConfigError` if the installed Celery is older than `OLDEST_CELERY`."""
    if tuple(celery.VERSION[:2]) < OLDEST_CELERY:
        oldest = ".".join(map(str, OLDEST_CELERY))
        raise ConfigError(
            f"Celery {celery.__version__} is installed, and delaytasks needs Celery {oldest} or newer; run: "
            f"pip install --upgrade 'celery>={oldest}'"
        )
