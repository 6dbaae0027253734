"""A database that refuses logins counts as unavailable, like a server that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import is_outage
from delaytasks.storage.database import Database


def refused(url: str, what: str, tmp_path: Path) -> str:
    """Return a URL whose connections the database refuses."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return f"sqlite:///{tmp_path}"  # the path is a folder, not a file
    changed = {
        "user": parsed.set(username="nobody_of_this_name", password="wrong"),
        "database": parsed.set(database="no_database_of_this_name"),
    }
    return changed[what].render_as_string(hide_password=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["user", "database"])
def test_an_error_while_connecting_is_an_outage(
    database_url: str, tmp_path: Path, what: str
) -> None:
    database = Database(refused(database_url, what, tmp_path))
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as raised:
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
    assert is_outage(raised.value)
    database.dispose()


def test_a_user_who_is_locked_out_while_running_is_an_outage(mysql_url: str) -> None:
    owner = Database(mysql_url)
    name = make_url(mysql_url).database
    user = f"locked_{name}"[:32]

    def do(*statements: str) -> None:
        owner.autocommitted(lambda c: [c.exec_driver_sql(one) for one in statements])

    do(f"CREATE USER '{user}'@'%%' IDENTIFIED BY 'p'", f"GRANT ALL ON {name}.* TO '{user}'@'%%'")
    try:
        url = make_url(mysql_url).set(username=user, password="p")
        database = Database(url.render_as_string(hide_password=False))
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
        do(f"ALTER USER '{user}'@'%%' ACCOUNT LOCK")
        database.dispose()
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
        database.dispose()
    finally:
        do(f"DROP USER '{user}'@'%%'")
        owner.dispose()
