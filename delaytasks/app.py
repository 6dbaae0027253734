"""The old name of `delaytasks.client`, for the type hints of worker/ and cli/."""

from delaytasks.client import DelayTasks

__all__ = ["DelayTasks"]
