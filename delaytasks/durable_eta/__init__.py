"""Celery messages that wait as rows, and are published when they are due.

See docs/durable-eta.md. `capture` has the message that Celery has prepared, its conversion to and
from the body of a row, and what a revoke does with it. `publish` has the calls: schedule, publish
and revoke.
"""
