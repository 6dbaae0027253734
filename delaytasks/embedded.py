"""Store and broker for a machine without any service."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any


def socket_path(data_dir: str) -> Path:
    """Where the private Redis listens. Not in data_dir itself: a socket's path may have 107 bytes only."""
    digest = hashlib.sha256(str(Path(data_dir).absolute()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"delaytasks-{os.getuid()}-{digest}" / "redis.sock"


def use_embedded_broker(app: Any, data_dir: str) -> None:
    app.conf.broker_url = f"redis+socket://{socket_path(data_dir)}"
