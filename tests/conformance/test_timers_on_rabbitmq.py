"""The timers' conformance suite on rabbitmq."""

from tests.conformance import timer_faults, timers


class TestTimers(timers.Timers):
    broker = "rabbitmq"


class TestTimersUnderFaults(timer_faults.TimersUnderFaults):
    broker = "rabbitmq"
