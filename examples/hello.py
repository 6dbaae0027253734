"""The smallest processor. `celeryconfig.py` imports it, so that `./dev up` has a task to run:

.venv/bin/delaytasks schedule hello '{"name": "you"}' --delay 5
"""

from __future__ import annotations

import logging
from typing import Any

from delaytasks import processor

logger = logging.getLogger(__name__)


@processor("hello")
def say_hello(body: dict[str, Any]) -> None:
    logger.info("hello, %s", body.get("name", "world"))
