"""Django imports this first, so the Celery app is made, and current, in web processes too."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
