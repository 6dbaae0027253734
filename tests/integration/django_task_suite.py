"""Run the tests of Django's own task backends with our backend in place of them.

    python tests/integration/django_task_suite.py FOLDER PACKAGE

FOLDER contains PACKAGE: the folder `tests` of Django's sources contains `tasks`, and the sources of
the package `django-tasks` contain `tests`. `./dev test-django` runs the tests of Django, and
`./dev test-oldest` those of the package.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import TestCase, TestSuite

import django
from celery import Celery
from django.conf import settings

#: Tests of features that the two backends lack or keep in memory, unlike ours.
NOT_APPLICABLE = {
    "DummyBackendTestCase.test_refresh_result": "changes the result in memory",
    "DummyBackendTestCase.test_refresh_result_async": "changes the result in memory",
    "ImmediateBackendTestCase.test_cannot_get_result": "our results can be read",
    "ImmediateBackendTestCase.test_cannot_refresh_result": "our results can be read",
    "ImmediateBackendTestCase.test_get_result_from_different_request": "our results can be read",
    "ImmediateBackendTestCase.test_cannot_pass_run_after": "our tasks can wait",
    "ImmediateBackendTestCase.test_throws_keyboard_interrupt": "only a worker is interrupted",
}

#: Django's tests of its tasks have no URLs.
urlpatterns: list[Any] = []
celery_app = Celery("suite", broker="memory://", set_as_current=False)


def main(folder: str, package: str) -> int:
    # Coroutines of these tests call synchronous methods, since backends in memory allow it.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    sys.path.insert(0, folder)
    urls = f"{package}.urls"
    given = _settings_of(package)
    ours: dict[str, Any] = {
        "DATABASES": {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        "INSTALLED_APPS": ["delaytasks.contrib.django", *given.pop("INSTALLED_APPS", [])],
        "DELAYTASKS": {"celery_app": f"{__name__}.celery_app"},
        "ROOT_URLCONF": urls if find_spec(urls) else __name__,
        "SECRET_KEY": "a secret of the tests",
        "USE_TZ": True,
    }
    settings.configure(**{**given, **ours})
    django.setup()
    _replace_backends()
    return _run(package)


def _settings_of(package: str) -> dict[str, Any]:
    """Return the settings that come with the tests. Those of Django itself have none."""
    if find_spec(f"{package}.settings") is None:
        return {}
    found = vars(importlib.import_module(f"{package}.settings"))
    return {name: value for name, value in found.items() if name.isupper()}


def _replace_backends() -> None:
    from delaytasks.contrib.django import tasks_backend
    from delaytasks.testing import DelaysTester

    class StoringBackend(tasks_backend.DelayTasksBackend):
        """Has the two names that tests use of the backend that only keeps tasks."""

        @property
        def results(self) -> list[tasks_backend.TaskResult]:
            with DelaysTester() as tester:
                return [self.get_result(str(task.id)) for task in tester.scheduled()]

        def clear(self) -> None:
            with DelaysTester() as tester:
                tester.clear()

    class RunningBackend(tasks_backend.DelayTasksBackend):
        """Runs each task before `enqueue` returns."""

        def enqueue(self, *arguments: Any, **options: Any) -> tasks_backend.TaskResult:
            with DelaysTester() as tester:
                result = super().enqueue(*arguments, **options)
                tester.run_due(raises=False)
                result.refresh()
            return result

    backends = tasks_backend.BaseTaskBackend.__module__.rpartition(".")[0]
    dummy: Any = importlib.import_module(f"{backends}.dummy")
    immediate: Any = importlib.import_module(f"{backends}.immediate")
    dummy.DummyBackend, immediate.ImmediateBackend = StoringBackend, RunningBackend


def _run(package: str) -> int:
    from django.test import SimpleTestCase
    from django.test.runner import DiscoverRunner

    class Runner(DiscoverRunner):
        def build_suite(self, *arguments: Any, **options: Any) -> TestSuite:
            suite = super().build_suite(*arguments, **options)
            applicable: TestSuite = self.test_suite(filter(_applies, _tests(suite)))
            return applicable

    SimpleTestCase.databases = frozenset({"default"})
    return int(Runner().run_tests([package]))


def _tests(suite: TestSuite) -> Iterator[TestCase]:
    for test in suite:
        if isinstance(test, TestSuite):
            yield from _tests(test)
        elif isinstance(test, TestCase):
            yield test


def _applies(test: TestCase) -> bool:
    name = ".".join(test.id().split(".")[-2:])
    if name in NOT_APPLICABLE:
        print(f"not applicable: {name} ({NOT_APPLICABLE[name]})")
    return name not in NOT_APPLICABLE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
