"""Tasks of Django's own framework; before Django 6 they are those of the package django-tasks."""

import logging

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

logger = logging.getLogger(__name__)


@task
def send_receipt(number: int) -> None:
    logger.info("the receipt of order %s is sent", number)
