"""What the shop does later. These two functions are all that it has to write."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from delaytasks import processor

#: The payment partner answers when this file exists.
PARTNER = "DEMO_PARTNER"


@processor("order.close")
def close_order(body: dict[str, Any]) -> None:
    """The order was not paid in time: its goods go back on the shelf."""
    time.sleep(0.005 * body["items"])


@processor("payment.capture")
def capture_payment(body: dict[str, Any]) -> None:
    """Fetches the money of a paid order. An exception makes the task FAILED, with its traceback in the row."""
    if not Path(os.environ[PARTNER]).exists():
        raise ConnectionError(f"the payment partner answers 503 for order {body['order']}")
