"""Serves the console by itself, for `delaytasks console` and `delaytasks up`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flask import Flask
from waitress.server import create_server

from delaytasks.client import DelayTasks
from delaytasks.console.application import make_console
from delaytasks.console.users import FIRST_USER, UserFile, session_key
from delaytasks.console.viewers import Access, ProxyAccess, Role
from delaytasks.core.errors import ConfigError

#: The files in the data folder.
USERS, KEY = "console-users.json", "console-key"
THREADS = 8


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


def make_server(
    app: Any, host: str, port: int, prefix: str, trusted_proxy: str | None = None
) -> Any:
    """Return a server that listens; its method `run` serves until it is interrupted.

    Parameters
    ----------
    trusted_proxy
        The address of a proxy whose `X-Forwarded-For` and `X-Forwarded-Proto` name the address and
        the scheme of the browser.
    """
    forwarded: dict[str, Any] = {}
    if trusted_proxy is not None:
        forwarded = {
            "trusted_proxy": _address(trusted_proxy),
            "trusted_proxy_headers": {"x-forwarded-for", "x-forwarded-proto"},
            "clear_untrusted_proxy_headers": True,
        }
    try:
        return create_server(
            app, host=host, port=port, threads=THREADS, url_prefix=prefix, ident=None, **forwarded
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"the console cannot listen on {host}:{port}: {reason}") from error


def _address(text: str) -> str:
    """Return an address as the server compares it with that of a peer."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"the trusted proxy is an IP address, not {text!r:.60}") from None
