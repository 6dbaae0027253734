"""Everything that patches or works around Celery, kombu or billiard."""
