"""The delayed tasks of the shop. A user writes only these two functions."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from delaytasks import processor

#: The payment partner answers if this file exists.
PARTNER = "DEMO_PARTNER"


@processor("order.close")
def close_order(body: dict[str, Any]) -> None:
    """Close an order that was not paid in time, and return its goods to the stock."""
    time.sleep(0.005 * body["items"])


@processor("payment.capture")
def capture_payment(body: dict[str, Any]) -> None:
    """Collect the money of a paid order.

    After an exception the task is FAILED, and its row contains the traceback.
    """
    if not Path(os.environ[PARTNER]).exists():
        raise ConnectionError(f"the payment partner answers 503 for order {body['order']}")
