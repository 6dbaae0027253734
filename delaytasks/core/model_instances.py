"""Recognize model instances of Django and of SQLAlchemy, of which callers pass the primary key."""

from __future__ import annotations


def key_remedy(value: object) -> str:
    """Return the end of an error message about `value`; empty if it is no model instance."""
    kind = type(value)
    if hasattr(kind, "_meta") and hasattr(kind, "pk"):
        return "; it is a model instance: pass its pk, and load the instance in the processor"
    if hasattr(kind, "__mapper__"):
        return (
            "; it is an instance that SQLAlchemy maps: pass its primary key, and load the instance "
            "in the processor"
        )
    return ""
