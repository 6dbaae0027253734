"""Expect that a call is refused because of one of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from delaytasks import CancelResult, InvalidInputError


@contextmanager
def invalid(
    argument: str, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[InvalidInputError]]:
    """Expect an `InvalidInputError` that names the argument."""
    with pytest.raises(InvalidInputError, match=match) as caught:
        yield caught
    assert type(caught.value) is InvalidInputError
    assert caught.value.argument == argument, caught.value


def raised(result: CancelResult) -> CancelResult:
    """Return the result of `cancel`, or raise its error."""
    if result.error is not None:
        raise result.error
    return result
