"""The file of an SQLite database, readable by its owner only."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from sqlalchemy import URL

from delaytasks.core.errors import StoreError
from delaytasks.core.private_files import FOLDER_MODE, make_file


def path_of(url: URL) -> Path | None:
    """Return the path; None for other databases and for a database in memory."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name == ":memory:":
        return None
    if not (name.startswith("file:") and "uri" in url.query):
        return Path(name)
    path = unquote(urlsplit(name).path)
    return Path(path) if path not in ("", ":memory:") and _mode_of(url) != "memory" else None


def _mode_of(url: URL) -> str | None:
    """Return how a URL with a `file:` URI opens the database: `ro`, `rw`, `rwc` or `memory`."""
    given = url.query.get("mode") or dict(parse_qsl(urlsplit(url.database or "").query)).get("mode")
    return given if isinstance(given, str) else None


def is_missing(url: URL) -> bool:
    path = path_of(url)
    return path is not None and not path.exists()


def create(url: URL) -> None:
    """Make an empty database file unless it exists. SQLite gives -wal, -shm and -journal its
    mode."""
    path = path_of(url)
    if path is not None and not path.exists() and _mode_of(url) not in ("ro", "rw"):
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        make_file(path)


def check(url: URL, tables_remedy: str) -> None:
    """Raise `StoreError` if the file is missing: SQLite would make an empty one in the current
    folder."""
    path = path_of(url)
    if path is not None and not path.exists():
        raise StoreError(
            f"there is no database {path.absolute()}: go to your project's folder, name your "
            "Celery app (delaytasks -A APP …) or its database (DELAYTASKS_DATABASE_URL); "
            f"to make a new one here, {tables_remedy}"
        )
