"""The timers' conformance suite on rabbitmq-quorum."""

from tests.conformance import timer_faults, timers


class TestTimers(timers.Timers):
    broker = "rabbitmq-quorum"


class TestTimersUnderFaults(timer_faults.TimersUnderFaults):
    broker = "rabbitmq-quorum"
