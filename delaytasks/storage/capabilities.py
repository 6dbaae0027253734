"""The features of each supported database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from delaytasks.core.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """The features of a database.

    Modules of the storage package ask for a database's name only where each database has a notation
    of its own: types, JSON lists, INSERT that skips rows, the catalogue. They choose with
    `for_database`, which refuses a database that is not supported.
    """

    #: One UPDATE can select, lock, change and return rows.
    update_returning: bool = False
    #: A list of ids is one parameter, and the index is used whatever the statistics contain.
    array_parameters: bool = False
    #: INSERT can skip rows that exist. Where it cannot, a failed INSERT leaves the transaction
    #: usable.
    insert_or_skip: bool = False
    #: COPY FROM STDIN.
    copy: bool = False
    #: An INSERT of many rows is fastest with a parameter for each value, not with a JSON list of
    #: rows.
    binds_values: bool = False
    #: A text can be split into an array, and an index can find the texts that contain some parts.
    text_arrays: bool = False
    #: LISTEN and NOTIFY: a commit sends messages to the connections that listen.
    notify: bool = False
    #: A list of ids finds rows faster than a join with a table of them.
    looks_up_lists: bool = False
    #: PREPARE works for statements that are sent past SQLAlchemy.
    prepare: bool = False
    #: The driver begins a transaction with the first statement that writes, not with the first
    #: statement.
    begins_late: bool = False
    #: A caller's transaction may read as of its start, and then does not see later commits.
    reads_as_of_start: bool = False
    #: A server-side cursor returns rows in parts, inside a transaction.
    server_side_cursors: bool = False
    #: TABLESAMPLE reads some blocks of a table, chosen at random.
    block_samples: bool = False
    #: The planner estimates how many rows a query returns.
    estimates: bool = False
    #: A statement can let its transaction end before the changes are on the disk.
    asynchronous_commit: bool = False
    #: A column of instants has a time zone, and its text may name one.
    time_zones: bool = False


POSTGRESQL = Capabilities(
    update_returning=True,
    array_parameters=True,
    insert_or_skip=True,
    copy=True,
    text_arrays=True,
    notify=True,
    looks_up_lists=True,
    prepare=True,
    server_side_cursors=True,
    block_samples=True,
    estimates=True,
    asynchronous_commit=True,
    time_zones=True,
)
MYSQL = Capabilities(
    looks_up_lists=True,
    estimates=True,
    reads_as_of_start=True,
    server_side_cursors=True,
)
SQLITE = Capabilities(
    update_returning=True,
    insert_or_skip=True,
    binds_values=True,
    begins_late=True,
)
T = TypeVar("T")


def for_database(name: str, *, postgresql: T, mysql: T, sqlite: T) -> T:
    """Return the choice for a database, whose name is that of its SQLAlchemy dialect.

    Raises
    ------
    ConfigError
        If delaytasks does not support the database.
    """
    choices = {"postgresql": postgresql, "mysql": mysql, "mariadb": mysql, "sqlite": sqlite}
    if name not in choices:
        raise ConfigError(
            f"delaytasks does not support the database {name!r}; it supports {', '.join(choices)}"
        )
    return choices[name]


def capabilities_of(name: str) -> Capabilities:
    return for_database(name, postgresql=POSTGRESQL, mysql=MYSQL, sqlite=SQLITE)
