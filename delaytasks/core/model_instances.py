"""Recognize model instances of Django, of which callers pass the `pk`."""

from __future__ import annotations


def pk_remedy(value: object) -> str:
    """Return the end of an error message about `value`; empty if it is no model instance."""
    kind = type(value)
    if not (hasattr(kind, "_meta") and hasattr(kind, "pk")):
        return ""
    return "; it is a model instance: pass its pk, and load the instance in the processor"
