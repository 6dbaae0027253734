"""The verbs: schedule, run, sweep. Sees the store and the timers only through `core.ports`."""
