"""Concurrency limits and rate limits: which due tasks may start, and in which order."""
