"""Takes the places in a Celery app where delayed tasks are sent and revoked."""
