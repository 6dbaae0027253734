"""The pytest plugin of delaytasks: the fixtures `delays` and `inline_delays`.

pytest imports this module in every test run where delaytasks is installed. Therefore it imports
nothing else: delaytasks is imported with the first test that uses one of the fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from delaytasks.testing import DelaysTester


@pytest.fixture
def delays_instance() -> Any:
    """Override this fixture to return your `DelayTasks`.

    None means the instance of the Django project, or the one behind the functions of the module
    `delaytasks`.
    """
    return None


@pytest.fixture
def delays_bind() -> Any:
    """Override this fixture to return the SQLAlchemy Connection, Session or Engine of the test.

    None means the database of the settings, or Django's connection.
    """
    return None


@pytest.fixture
def delays(delays_instance: Any, delays_bind: Any) -> Iterator[DelaysTester]:
    """Return a started `DelaysTester`: the test looks at scheduled tasks and runs them."""
    from delaytasks.testing import DelaysTester

    with DelaysTester(delays_instance, bind=delays_bind) as tester:
        yield tester


@pytest.fixture
def inline_delays(delays_instance: Any, delays_bind: Any) -> Iterator[DelaysTester]:
    """Return a started `DelaysTester` that runs each task when its transaction is committed."""
    from delaytasks.testing import DelaysTester

    with DelaysTester(delays_instance, bind=delays_bind, run_inline=True) as tester:
        yield tester
