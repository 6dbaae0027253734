"""Checks that a statement changed exactly the rows that its transaction has locked."""

from __future__ import annotations

from delaytasks.core.errors import StoreError


def check_row_count(changed: int, locked: int, what: str) -> None:
    """Raise `StoreError`, which rolls the transaction back, if not all locked rows were changed."""
    if changed != locked:
        raise StoreError(
            f"{what}: {changed} of {locked} locked rows were changed, so the transaction is rolled "
            "back; look for a trigger or another program that changes rows which it has not locked"
        )
