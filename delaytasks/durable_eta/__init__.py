"""Celery messages that wait as rows, and are published when they are due."""
