"""A task as a JSON value, for programs and for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from delaytasks.core.body_json import MAX_DEPTH
from delaytasks.core.encryption import is_encrypted, placeholder
from delaytasks.core.errors import BodyEncryptedError


def task_json(task: Any) -> dict[str, Any]:
    """Return the JSON value of a `DelayTask`."""
    return {
        "id": str(task.id),
        "tag": task.tag,
        "key": task.key,
        "status": task.status.name,
        "queue": task.queue,
        "priority": task.priority,
        "body": _shown(task.body_json),
        "due_time": iso(task.due),
        "expected_time": iso(task.expected_time),
        "execution_time": iso(task.execution_time),
        "create_time": iso(task.create_time),
        "update_time": iso(task.update_time),
        "lease_until": iso(task.lease_until),
        "delay_s": task.delay_s,
        "attempts": task.attempts,
        "lapses": task.lapses,
        "version": task.version,
        "worker": task.worker,
        "ip_address": task.ip_address,
        "error": task.error,
        "headers": _shown(task.headers_json) if task.headers else {},
        "concurrency_key": task.concurrency_key,
        "meta": task.meta,
        "result": None if task.result_json is None else _shown(task.result_json),
    }


def iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _shown(text: str | None) -> Any:
    """Return the decoded value if JSON can represent it, else the text.

    Python also decodes NaN, 1e400 and values of any depth.
    """
    if text is not None and is_encrypted(text):
        return placeholder(text)
    value = lenient(text or "null")
    return value if _is_json(value, MAX_DEPTH) else text


def _is_json(value: Any, depth: int) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_json(item, depth - 1) for item in inner)
    return not isinstance(value, float) or math.isfinite(value)


def lenient(text: str) -> Any:
    """Return the decoded value, or the text if another program stored no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def pretty(read: Callable[[], Any], stored: str) -> str:
    """Return a body or a result as indented JSON, in which integers of any size are exact.

    Parameters
    ----------
    read
        Decodes the value.
    stored
        The stored text, which is returned if it is no JSON.
    """
    try:
        return json.dumps(read(), indent=2, ensure_ascii=False)
    except BodyEncryptedError:
        return placeholder(stored)
    except (ValueError, RecursionError):
        return stored
