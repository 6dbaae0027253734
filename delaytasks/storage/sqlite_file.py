"""The file of an SQLite database, readable by its owner only."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL

from delaytasks.core.errors import StoreError
from delaytasks.core.private_files import FOLDER_MODE, make_file


def path_of(url: URL) -> Path | None:
    """Return the path; None for other databases and for a database in memory."""
    name = url.database
    if (
        url.get_backend_name() != "sqlite"
        or not name
        or name == ":memory:"
        or name.startswith("file:")
    ):
        return None
    return Path(name)


def is_missing(url: URL) -> bool:
    path = path_of(url)
    return path is not None and not path.exists()


def create(url: URL) -> None:
    """Make an empty database file unless it exists. SQLite gives -wal, -shm and -journal its
    mode."""
    path = path_of(url)
    if path is not None and not path.exists():
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        make_file(path)


def check(url: URL) -> None:
    """Raise `StoreError` if the file is missing: SQLite would make an empty one in the current
    folder."""
    if is_missing(url):
        raise StoreError(
            f"there is no database {Path(str(url.database)).absolute()}: go to your project's "
            "folder, name your Celery app (delaytasks -A APP …) or its database "
            "(DELAYTASKS_DATABASE_URL), or make a new one here: delaytasks db upgrade"
        )
