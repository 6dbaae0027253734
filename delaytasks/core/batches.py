"""Batches of items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last of which may be shorter."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
