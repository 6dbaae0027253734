"""The Django app: put `delaytasks.contrib.django` into INSTALLED_APPS. See docs/django.md."""
