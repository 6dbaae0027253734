"""The timers' conformance suite on rabbitmq-quorum."""

import pytest

from tests.conformance import timer_faults, timers

pytestmark = pytest.mark.slow


class TestTimers(timers.Timers):
    broker = "rabbitmq-quorum"


class TestTimersUnderFaults(timer_faults.TimersUnderFaults):
    broker = "rabbitmq-quorum"
