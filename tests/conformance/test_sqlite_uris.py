"""An SQLite database whose URL is a `file:` URI."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

from delaytasks.core.errors import StoreError
from delaytasks.storage.database import Database
from delaytasks.storage.engines import sqlite_path


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}"])
def test_a_missing_file_of_a_uri_is_an_error_and_is_made_for_its_owner(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "a file.sqlite3"
    uri = form.format(path).replace(" ", "%20")
    url = URL.create("sqlite", database=uri, query={"uri": "true"}).render_as_string()
    database = Database(url)
    database.expect_file()
    with pytest.raises(StoreError, match=r"there is no database .*a file"):
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
    assert not path.exists()
    database = Database(url)
    database.autocommitted(lambda c: c.exec_driver_sql("CREATE TABLE t (a)"))
    database.dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///file:a.db?uri=true", "a.db"),
        ("sqlite:///file:/x/a.db?mode=ro&uri=true", "/x/a.db"),
        ("sqlite:///file:a.db", "file:a.db"),
        ("sqlite:///a.db", "a.db"),
        ("sqlite:///file::memory:?uri=true", None),
        ("sqlite:///file:name?mode=memory&cache=shared&uri=true", None),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
    ],
)
def test_the_path_of_a_url(url: str, path: str | None) -> None:
    assert sqlite_path(make_url(url)) == (None if path is None else Path(path))
