"""The projects of docs/testing.md: a reader who copies the blocks has tests that pass.

The first line of a block names its file. The blocks of Django and Flask belong to the examples.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.doc_pages import section
from tests.running import ROOT, clean_environment, output_of

PAGE = ROOT / "docs" / "testing.md"


pytestmark = pytest.mark.slow
databases = pytest.mark.parametrize("fresh_url", ["postgresql", "sqlite"], indirect=True)


def write_files(heading: str, folder: Path) -> None:
    """Write the files of a section."""
    for block in section(PAGE, heading):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def run_pytest(folder: Path, url: str, *options: str) -> str:
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    command = [sys.executable, *"-m pytest -q -p no:cacheprovider".split(), *options]
    # A section takes minutes as its delay; the examples read theirs from the environment.
    own = {"PYTHONPATH": str(ROOT), "SHOP_PAY_WITHIN_S": "1800"}
    own |= {"CELERY_BROKER_URL": "amqp://localhost:1//"}
    urls = dict.fromkeys(["TEST_DATABASE_URL", "SHOP_DATABASE_URL"], url)
    return output_of(command, folder, clean_environment(**own, **urls))


def test_celery_alone(tmp_path: Path) -> None:
    write_files("Celery alone", tmp_path)
    assert "1 passed" in run_pytest(tmp_path, "sqlite://")
    assert not list(tmp_path.glob("*.sqlite3"))


@databases
def test_celery_sqlalchemy_and_fastapi_with_synchronous_sessions(
    fresh_url: str, tmp_path: Path
) -> None:
    write_files("Celery and SQLAlchemy", tmp_path)
    for _ in range(2):  # the first run leaves no rows
        assert "4 passed" in run_pytest(tmp_path, fresh_url)
    write_files("FastAPI with synchronous sessions", tmp_path)
    assert "1 passed" in run_pytest(tmp_path, fresh_url, "test_shop_api.py")


MORE = """
import pytest

def test_without_db(delays_tester):
    with pytest.raises(RuntimeError, match="Database access not allowed"):
        delays_tester.scheduled()
"""


@databases
def test_pytest_django(fresh_url: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "django_shop", project)
    write_files("Django", project)
    (project / "tests" / "test_more.py").write_text(MORE)
    assert "3 passed" in run_pytest(project, fresh_url, "--ds=shop.settings", "tests")
