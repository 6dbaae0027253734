"""Reports an installed Celery with which delaytasks does not work, or has not been tested."""

from __future__ import annotations

from typing import Any

import celery
from celery import signals
from celery.utils.log import get_logger

from delaytasks.core.errors import ConfigError
from delaytasks.worker.celery_compat.versions import NEWEST_TESTED_CELERY, OLDEST_CELERY

logger = get_logger(__name__)


def check_celery() -> None:
    """Raise `ConfigError` if the installed Celery is older than `OLDEST_CELERY`.

    If it is newer than `NEWEST_TESTED_CELERY`, each worker of this process logs a warning at start.
    """
    if tuple(celery.VERSION[:2]) < OLDEST_CELERY:
        oldest = _shown(OLDEST_CELERY)
        raise ConfigError(
            f"Celery {celery.__version__} is installed, and delaytasks needs Celery {oldest} or "
            f"newer; run: pip install --upgrade 'celery>={oldest}'"
        )
    signals.celeryd_after_setup.connect(
        warn_of_untested_celery, weak=False, dispatch_uid="delaytasks.celery_version"
    )


def warn_of_untested_celery(**_: Any) -> None:
    if tuple(celery.VERSION[:2]) > NEWEST_TESTED_CELERY:
        newest = _shown(NEWEST_TESTED_CELERY)
        logger.warning(
            "delaytasks: Celery %s is installed, and the newest release that this version of "
            "delaytasks was tested with is %s. delaytasks uses parts of Celery that may change "
            "in any release. Upgrade delaytasks, or run: pip install 'celery~=%s.0'",
            celery.__version__,
            newest,
            newest,
        )


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
