"""The timers' conformance suite on redis."""

from tests.conformance import timer_faults, timers


class TestTimers(timers.Timers):
    broker = "redis"


class TestTimersUnderFaults(timer_faults.TimersUnderFaults):
    broker = "redis"
