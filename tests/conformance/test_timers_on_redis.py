"""The timers' conformance suite on redis."""

from tests.conformance import timers


class TestTimers(timers.Timers):
    broker = "redis"


class TestTimersUnderFaults(timers.TimersUnderFaults):
    broker = "redis"
