"""For `celery -A shop worker` and `celery -A shop beat`."""

from shop import create_app

app = create_app().extensions["celery"]
