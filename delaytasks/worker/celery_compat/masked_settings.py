"""`celery inspect conf`, `celery report` and Flower show an app's settings, without those that Celery knows to be
secret. Ours it can not know: URLs with passwords in them, by names that do not say so."""

from __future__ import annotations

import re

from celery.app import utils

from delaytasks.core.settings import PREFIX, secret_names


def mask_settings() -> None:
    """Adds to what Celery leaves out, for all apps of this process."""
    known: re.Pattern[str] = utils.HIDDEN_SETTINGS
    names = [PREFIX + name for name in secret_names() if not known.search(PREFIX + name)]
    if names:
        utils.HIDDEN_SETTINGS = re.compile("|".join([known.pattern, *names]), known.flags)
