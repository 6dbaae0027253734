"""Pairs of meta, as people type them: `--meta tenant=acme`."""

from __future__ import annotations

from typing import Any

from delaytasks.cli.times import Parsed
from delaytasks.core.errors import InvalidMetaError


class Pair(tuple[str, str]):
    """A pair that was typed."""

    __slots__ = ()


def parse_pair(text: str) -> Pair:
    name, sign, value = text.partition("=")
    if not sign:
        raise InvalidMetaError(f"{text!r:.40} is no pair: write it as name=value")
    return Pair((name, value))


def pairs_or(value: Any) -> Any:
    """Return pairs as a dict, an empty option as None, and any other value as it is."""
    if isinstance(value, tuple) and value and isinstance(value[0], Pair):
        return dict(value)
    return value or None


PAIR = Parsed("pair", parse_pair)
