"""Celery tasks whose messages wait as rows, on each database."""
