"""The tested versions are the versions that may be installed, and others are reported."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import celery
import pytest
from celery import signals

from delaytasks.attachment import NEWEST_TESTED_CELERY
from tests.running import ROOT
from tests.world.recording import delays_on

#: Celery requires these libraries, and each of its releases limits their versions.
OF_CELERY = {"kombu", "billiard", "amqp", "redis"}
FRAMEWORKS = {
    "celery", "django", "flask", "flask-sqlalchemy", "fastapi", "starlette", "sentry-sdk",
    "opentelemetry-api", "sqlalchemy", "django-tasks", "litestar", "quart", "pytest-django",
    "freezegun", "time-machine",
}  # fmt: skip


def pinned() -> dict[str, str]:
    lines = (ROOT / "tests/oldest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_oldest_versions_that_may_be_installed_are_tested() -> None:
    requirements = (ROOT / "pyproject.toml").read_text()
    for package, version in pinned().items():
        found = re.findall(rf'"{package}(?:\[\w+\])?>=([0-9.]+)', requirements)
        if package in OF_CELERY:
            assert found == []
        else:
            assert {three_parts(oldest) for oldest in found} == {version}, package
    assert pinned().keys() >= FRAMEWORKS


def three_parts(version: str) -> str:
    return version if version.count(".") > 1 else f"{version}.0"


def test_the_docs_state_the_tested_versions() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    for package in FRAMEWORKS | {"kombu", "billiard"}:
        [tested] = re.findall(rf"(?mi)^\| {package} \|.*\| (.*) \|$", page)
        assert tested.split(", ")[0] == pinned()[package]
    stated = [".".join(map(str, version)) for version in (OLDEST_CELERY, NEWEST_TESTED_CELERY)]
    assert f"| Celery | {' to '.join(stated)} |" in page


# -- A Celery version that is untested is reported, with the version that works ------------------


#: `pyproject.toml` has the oldest version.
OLDEST_CELERY = tuple(map(int, pinned()["celery"].split(".")[:2]))


def test_a_worker_warns_of_a_celery_that_is_not_tested_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    major, minor = NEWEST_TESTED_CELERY
    for version in ((major, minor, 9), (major, minor + 1, 3)):
        monkeypatch.setattr(celery, "VERSION", version)
        monkeypatch.setattr(celery, "__version__", ".".join(map(str, version)))
        delays_on("sqlite://").close()
        signals.celeryd_after_setup.send(sender="worker", instance=None, conf=None)
    [warning] = [r.getMessage() for r in caplog.records if r.name == "delaytasks.attachment"]
    assert f"Celery {major}.{minor + 1}.3 is installed" in warning
    assert f"pip install 'celery~={major}.{minor}.0'" in warning


# -- audit ----------------------------------------------------------------------------------------


def test_an_unavailable_advisory_database_fails_the_audit() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        command = [sys.executable, str(ROOT / ".ci" / "audit.py"), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "NOT CHECKED" in done.stderr) == (3, True)
