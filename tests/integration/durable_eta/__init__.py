"""Tests of Celery tasks whose messages wait as rows."""
