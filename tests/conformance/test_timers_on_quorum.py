"""The timers' conformance suite on rabbitmq-quorum."""

from tests.conformance import timers


class TestTimers(timers.Timers):
    broker = "rabbitmq-quorum"


class TestTimersUnderFaults(timers.TimersUnderFaults):
    broker = "rabbitmq-quorum"
