"""What a body must be, as a processor's `schema` says: a dataclass, a pydantic model, or any callable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.text import shown

#: Of the schema's own words; a pydantic error about a long list would fill a page.
LONGEST = 500


class BodySchema:
    """Makes of a body, as it stands in the row, what the processor wants to be given."""

    def __init__(self, tag: str, kind: Callable[..., Any]) -> None:
        self._tag = tag
        self._kind = kind

    def __call__(self, body: Any) -> Any:
        """`BodyRefusedError` says what is wrong with the body."""
        kind = self._kind
        try:
            if hasattr(kind, "model_validate"):
                return kind.model_validate(body)
            if dataclasses.is_dataclass(kind):
                if not isinstance(body, dict):
                    raise TypeError(f"an object is needed, not {shown(body)}")
                return kind(**body)
            return kind(body)
        except Exception as error:  # whatever a schema raises is its way to refuse
            name, why = (
                getattr(kind, "__qualname__", repr(kind)),
                f"{type(error).__name__}: {error}",
            )
            message = f"{name} refuses the body of a task of tag {self._tag!r}: {why:.{LONGEST}}"
            raise BodyRefusedError(message) from error


def plain(body: Any) -> Any:
    """A body that is a dataclass or a pydantic model, as JSON says it; any other is left as it is."""
    if type(body) is dict:  # as most are
        return body
    if dataclasses.is_dataclass(body) and not isinstance(body, type):
        return dataclasses.asdict(body)
    if hasattr(body, "model_dump"):
        return body.model_dump(mode="json")
    return body
