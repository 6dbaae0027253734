"""Serves a WSGI application of delaytasks by itself, with waitress."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from waitress.server import create_server

from delaytasks.core.errors import ConfigError

THREADS = 8
#: A longer request is refused before the application sees it. Applications have lower limits.
MOST_RECEIVED_BYTES = 16 * 1024 * 1024


def make_server(
    app: Any, host: str, port: int, prefix: str, trusted_proxy: str | None = None
) -> Any:
    """Return a server that listens; its method `run` serves until it is interrupted.

    Parameters
    ----------
    app
        The WSGI application.
    prefix
        The path of the application, such as `/delays`, or an empty string.
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
            app,
            host=host,
            port=port,
            threads=THREADS,
            url_prefix=prefix,
            ident=None,
            max_request_body_size=MOST_RECEIVED_BYTES,
            **forwarded,
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error


def serve_at(
    app: Any,
    host: str,
    port: int,
    prefix: str,
    trusted_proxy: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until the process gets INT or TERM. `announce` is called with the URL."""
    server = make_server(app, host, port, prefix, trusted_proxy)
    # The first process of a container ignores TERM unless it has a handler.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    announce(f"http://{host}:{server.effective_port}{prefix}/")
    try:
        server.run()  # the exit ends it after the requests that have begun
    finally:
        signal.signal(signal.SIGTERM, before)
        server.close()


def _address(text: str) -> str:
    """Return an address as the server compares it with that of a peer."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"the trusted proxy is an IP address, not {text!r:.60}") from None
