"""Masks the secret settings of delaytasks in `celery inspect conf`, `celery report` and Flower.

Celery masks the settings whose names match a pattern. It does not know the settings of delaytasks,
of which some are URLs with passwords.
"""

from __future__ import annotations

import re

from celery.app import utils

from delaytasks.core.settings import PREFIX, secret_names


def mask_settings() -> None:
    """Extend Celery's pattern of hidden settings, for all apps of this process."""
    known: re.Pattern[str] = utils.HIDDEN_SETTINGS
    names = [PREFIX + name for name in secret_names() if not known.search(PREFIX + name)]
    if names:
        utils.HIDDEN_SETTINGS = re.compile("|".join([known.pattern, *names]), known.flags)
