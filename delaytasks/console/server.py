"""Makes the console that is served by itself, for `delaytasks console` and `delaytasks up`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flask import Flask

from delaytasks.client import DelayTasks
from delaytasks.console.application import make_console
from delaytasks.console.users import FIRST_USER, UserFile, session_key
from delaytasks.console.viewers import Access, ProxyAccess, Role

#: The files in the data folder.
USERS, KEY = "console-users.json", "console-key"


def users_of(delays: DelayTasks) -> UserFile:
    """Return the file of users in the data folder."""
    return UserFile(Path(delays.settings.data_dir).absolute() / USERS)


def proxy_access(delays: DelayTasks, header: str, proxies: Sequence[str]) -> ProxyAccess:
    """Return the rule for a proxy that names the user in a header; the file has the roles."""
    return ProxyAccess(header, proxies, Role.VIEW, users_of(delays).role)


def standalone(
    delays: DelayTasks, say: Callable[[str], None], access: Access | None = None
) -> Flask:
    """Return the console for a server of its own.

    Parameters
    ----------
    say
        Prints the first password. It is generated once, and stored only as a hash.
    access
        The rule that names the viewers; None means the file of users.
    """
    users = users_of(delays)
    key = session_key(users.path.with_name(KEY))
    if access is not None:
        return make_console(delays, access, secret_key=key)
    password = users.make_first()
    if password is not None:
        say(f"The console's first user is {FIRST_USER} with the password {password}")
        say(f"It is printed once; {users.path} has its hash.")
    return make_console(delays, users, secret_key=key)
