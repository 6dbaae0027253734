"""Configuration of the Celery app in `delaytasks.celery`. Every setting here has a default.

The broker: CELERY_BROKER_URL, or `broker_url` here; without either, message files in
`.delaytasks/`. The database: DELAYTASKS_DATABASE_URL, or `delaytasks_database_url` here;
without either, SQLite in `.delaytasks/`. `delaytasks check --settings` prints all settings with
their origin.
"""

from __future__ import annotations

# Modules that register processors; worker and beat import them.
imports = ["examples.hello"]

# Beat starts a sweep every five seconds. Any number of beats is harmless.
beat_schedule = {"delaytasks-sweep": {"task": "delaytasks.sweep", "schedule": 5.0}}

broker_connection_retry_on_startup = True
task_ignore_result = True
worker_prefetch_multiplier = 4
