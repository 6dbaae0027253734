"""A broker for a machine without services: a private Redis on a Unix socket, or plain files.

The broker listens on no port. The database has all tasks, so the broker's files may be deleted at
any time. `delaytasks up` starts the Redis, and `python -m delaytasks.cli.embedded` does so for a
Procfile.
"""

from delaytasks.embedded.broker import (
    FILES_NOTE,
    Broker,
    begin,
    broker_of,
    choose,
    leave,
    lock_folder,
    record,
    use_embedded_broker,
)
from delaytasks.embedded.server import (
    Server,
    answers,
    check_private,
    find_server,
    server_command,
    socket_path,
)

__all__ = [
    "FILES_NOTE",
    "Broker",
    "Server",
    "answers",
    "begin",
    "broker_of",
    "check_private",
    "choose",
    "find_server",
    "leave",
    "lock_folder",
    "record",
    "server_command",
    "socket_path",
    "use_embedded_broker",
]
