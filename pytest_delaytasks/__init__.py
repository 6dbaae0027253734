"""The pytest plugin of delaytasks: the fixture `delays_tester`.

pytest imports this module in every test run where delaytasks is installed. Therefore it imports
nothing else: delaytasks is imported with the first test that uses one of the fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from delaytasks import DelayTasks
    from delaytasks.testing import DelaysTester


@pytest.fixture
def delays() -> DelayTasks:
    """Override this fixture to return another `DelayTasks` than that of `current_delays`."""
    from delaytasks import current_delays

    return current_delays()


@pytest.fixture
def delays_bind() -> Any:
    """Override this fixture to return the SQLAlchemy Connection, Session or Engine of the test.

    None means the database of the settings, or Django's connection.
    """
    return None


@pytest.fixture
def delays_tester(delays: DelayTasks, delays_bind: Any) -> Iterator[DelaysTester]:
    """Return a started `DelaysTester`: the test looks at scheduled tasks and runs them."""
    from delaytasks.testing import DelaysTester

    with DelaysTester(delays, bind=delays_bind) as tester:
        yield tester
