"""Timers: they keep the tasks that are due within the horizon, and hand them to workers in time."""
