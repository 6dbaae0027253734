"""Sweeps on an SQLite file, with a timer that records what it is given."""
