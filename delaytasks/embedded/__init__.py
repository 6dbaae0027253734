"""The broker for a machine without any service: a private Redis on a Unix socket, or else plain files.

Nothing listens on a port. The database is the truth, so whatever is kept here may be deleted at any time.
`delaytasks up` starts the server, and so does `python -m delaytasks.cli.embedded` for a Procfile.
"""

from delaytasks.embedded.broker import (
    FILES_NOTE,
    Broker,
    begin,
    broker_of,
    choose,
    hold,
    leave,
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
    "hold",
    "leave",
    "record",
    "server_command",
    "socket_path",
    "use_embedded_broker",
]
