"""Processors of the shop with faults, which its workers import."""

from __future__ import annotations

import time
from typing import Any

from delaytasks import processor


@processor("order.close")
def close(body: Any) -> None:
    time.sleep(0.01)


@processor("newsletter.send")
def send(body: Any) -> None:
    time.sleep(0.1)


@processor("report.build")
def build(body: Any) -> None:
    time.sleep(20)


@processor("pay.notify")
def notify(body: Any) -> None:
    raise ConnectionError(
        f"HTTPSConnectionPool(host='pay.example', port={body['port']}): timed out"
    )
