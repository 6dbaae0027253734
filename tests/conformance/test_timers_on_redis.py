"""The timers' conformance suite on redis."""

import pytest

from tests.conformance import timer_faults, timers

pytestmark = pytest.mark.slow


class TestTimers(timers.Timers):
    broker = "redis"


class TestTimersUnderFaults(timer_faults.TimersUnderFaults):
    broker = "redis"
