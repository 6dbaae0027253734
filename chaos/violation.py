"""What a rule of the checker finds."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    invariant: str
    kind: str
    text: str
