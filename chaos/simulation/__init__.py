"""Producers, workers and a broker in one process, on a clock that is set: the real code, in orders that seeds draw."""
