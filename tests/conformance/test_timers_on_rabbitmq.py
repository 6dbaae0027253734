"""The timers' conformance suite on rabbitmq."""

from tests.conformance import timers


class TestTimers(timers.Timers):
    broker = "rabbitmq"


class TestTimersUnderFaults(timers.TimersUnderFaults):
    broker = "rabbitmq"
