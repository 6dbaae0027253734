"""Simulate producers, workers and a broker in one process on a simulated clock.

The code is the real one. A seed determines the order of all steps.
"""
