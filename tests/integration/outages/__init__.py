"""Test brokers and databases that are unreachable, slow, or interrupt connections.

Callers wait within the limits, no task is lost, and no task runs twice.
"""
