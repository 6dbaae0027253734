"""The testing kit: runs delayed tasks in a test, without a broker and without waiting.

See docs/testing.md. pytest finds the fixtures of the package `pytest_delaytasks` by itself.
"""

from unittest.mock import ANY

from delaytasks.testing.tester import DelaysTester, Run, SentTask, create_tables

__all__ = ["ANY", "DelaysTester", "Run", "SentTask", "create_tables"]
