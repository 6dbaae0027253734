"""Celery's side: the message handlers, what the worker's main process does, and the surroundings of a row."""
