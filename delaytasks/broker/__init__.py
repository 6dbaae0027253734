"""The link to the broker, and the timers, which keep the tasks that are due within the horizon."""
