"""The Celery worker: its main process, and the context in which the pool's processes run tasks."""
