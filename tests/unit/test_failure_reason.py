"""The reasons for which chunks fail."""

from __future__ import annotations

import pytest

from delaytasks.core.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.execution.runner import FailureReason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailableError("the database cannot be reached"), FailureReason.UNAVAILABLE),
        (OutcomeUnknownError("the connection broke before the answer"), FailureReason.UNAVAILABLE),
        (StoreError("the tables are missing"), FailureReason.REFUSED),
        (KeyError("a bug"), FailureReason.UNKNOWN),
        (ValueError("a row that cannot be read"), FailureReason.UNKNOWN),
    ],
)
def test_only_an_unavailable_database_counts_as_unavailable(
    error: Exception, reason: FailureReason
) -> None:
    assert FailureReason.of(error) is reason
