"""The schema of a processor's bodies: a dataclass, a pydantic model, or any callable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.text import shown

#: Characters of the schema's error text. A pydantic error about a long list fills a page.
MAX_REASON_LENGTH = 500


class BodySchema:
    """Converts a stored body into the type that the processor receives."""

    def __init__(self, tag: str, kind: Callable[..., Any]) -> None:
        self._tag = tag
        self._kind = kind

    def __call__(self, body: Any) -> Any:
        """Return the converted body, or raise `BodyRefusedError` with the reason."""
        kind = self._kind
        try:
            if hasattr(kind, "model_validate"):
                return kind.model_validate(body)
            if dataclasses.is_dataclass(kind):
                if not isinstance(body, dict):
                    raise TypeError(f"an object is needed, not {shown(body)}")
                return kind(**body)
            return kind(body)
        except Exception as error:  # a schema may raise any exception
            name = getattr(kind, "__qualname__", repr(kind))
            why = f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]
            raise BodyRefusedError(
                f"{name} refuses the body of a task of tag {self._tag!r}: {why}"
            ) from error


def plain(body: Any) -> Any:
    """Convert a dataclass or a pydantic model to JSON types; return any other body unchanged."""
    if type(body) is dict:  # as most bodies are
        return body
    if dataclasses.is_dataclass(body) and not isinstance(body, type):
        return dataclasses.asdict(body)
    if hasattr(body, "model_dump"):
        return body.model_dump(mode="json")
    return body
