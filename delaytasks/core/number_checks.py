"""Checks of numbers that callers pass. A bool is not a number."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Return False for NaN as well."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return least <= value <= most
