"""Pausing and resuming tags and queues, on every database."""
