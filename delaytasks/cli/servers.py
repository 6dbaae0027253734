"""`delaytasks serve` and `access`: the console, the HTTP API and metrics, and their users."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from delaytasks.cli.context import Cli, Command, check_belongs, pass_cli, signals_to
from delaytasks.cli.options import Typed
from delaytasks.cli.output import Table
from delaytasks.http_api.api_keys import API_KEYS, ApiKeyFile
from delaytasks.model.errors import ConfigError, InvalidInputError
from delaytasks.model.text import needs_extra
from delaytasks.operate.operations import Kind
from delaytasks.settings import Address

if TYPE_CHECKING:
    from delaytasks.console.requests import UserFile

CONSOLE_PORT, API_PORT, METRICS_PORT = 5556, 5557, 9819
_keys_option = click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="API: the file of the keys [api-keys.json in delaytasks_data_dir].",
)


class Place(NamedTuple):
    """Where an application is served: an address, and a path such as `/delays` or an empty text."""

    address: Address
    path: str = ""

    def url(self, port: int) -> str:
        return f"http://{self.address._replace(port=port)}{self.path}/"


def _place(text: str, option: str) -> Place:
    """Read `[HOST:]PORT[/PATH]`."""
    start, slash, path = text.partition("/")
    address = Address.read(start)
    if address is None:
        rule = "write it as 8080, 0.0.0.0:8080, [::1]:8080 or 8080/delays"
        raise InvalidInputError(f"{text!r:.60} is no address; {rule}", option)
    return Place(address, f"{slash}{path}".rstrip("/"))


def _served(option: str, port: int, about: str) -> Callable[[Callable[..., Any]], Any]:
    return click.option(
        option,
        type=Typed(Kind("[HOST:]PORT[/PATH]", parse=_place)),
        is_flag=False,
        flag_value=f"127.0.0.1:{port}",
        help=f"Serve {about}, without a value at 127.0.0.1:{port}.",
    )


@click.command(cls=Command)
@_served("--console", CONSOLE_PORT, "web pages that show whether tasks run on time")
@_served("--api", API_PORT, "the HTTP API, for programs in other languages")
@_served("--metrics", METRICS_PORT, "metrics of the database and the broker to Prometheus")
@click.option("--trusted-proxy", help="The address of a proxy, whose X-Forwarded-… are believed.")
@click.option("--proxy-header", help="Console: a proxy names the user in it: X-Forwarded-User.")
@click.option("--proxy", multiple=True, help="Console: its address or network. [127.0.0.1, ::1]")
@_keys_option
@pass_cli
def serve(cli: Cli, trusted_proxy: str | None, **options: Any) -> None:
    """Serve the console, the HTTP API and metrics, each at a port of its own.

    \b
    delaytasks serve --console --api
    delaytasks serve --console 8080 --proxy-header X-Forwarded-User
    delaytasks serve --metrics 0.0.0.0:9819

    The first start of the console generates a password and prints it once. `access` adds users of
    the console, and keys of the API.
    """
    console, api, metrics = (options[name] for name in ("console", "api", "metrics"))
    if not (console or api or metrics):
        raise click.UsageError("say what to serve: --console, --api or --metrics")
    belong_to = {"--console": "proxy_header proxy", "--api": "keys"}
    check_belongs(belong_to, {"--console": console, "--api": api}, options)
    if options["proxy_header"] is not None and trusted_proxy is not None:
        # --proxy is compared with the address that --trusted-proxy replaces by the browser's.
        raise ConfigError("--proxy-header and --trusted-proxy cannot be combined")
    if console or api:  # metrics need no processors
        cli.import_processors()
    apps: dict[str, tuple[Any, Place]] = {}
    # These modules name their extras themselves.
    if console:
        from delaytasks.console.application import standalone

        with needs_extra("console"):  # before the first start makes a password
            import waitress  # noqa: F401
        header, proxies = options["proxy_header"], options["proxy"] or ("127.0.0.1", "::1")
        apps["console"] = standalone(cli.delays, header, proxies), console
    if api:
        from delaytasks.http_api.routes import make_api

        apps["api"] = make_api(cli.delays, _key_file(cli, options["keys"])), api
    if metrics:
        from delaytasks.operate.metrics import exporter_app

        apps["metrics"] = exporter_app(cli.delays), metrics

    def announce(urls: dict[str, str]) -> None:
        cli.answer(urls, *(f"{name} at {url} ready." for name, url in urls.items()))

    serve_apps(apps, trusted_proxy, announce)


# -- Serve the applications by themselves, with waitress -------------------------------------------


THREADS = 8
#: Connections that are open at a time, in less than the usual 1,024 files of a process, and how
#: long one may be idle: half a request, or a connection without one, keeps others out only so long.
MOST_CONNECTIONS, IDLE_S = 800, 30
#: A longer request is refused before the application sees it. Applications have lower limits.
MOST_RECEIVED_BYTES = 16 * 1024 * 1024


def make_server(
    app: Any, place: Place, trusted_proxy: str | None = None, sockets: dict[int, Any] | None = None
) -> Any:
    """Return a server that listens; its method `run` serves until it is interrupted.

    Parameters
    ----------
    app
        The WSGI application.
    trusted_proxy
        The address of a proxy whose `X-Forwarded-For` and `X-Forwarded-Proto` name the address and
        the scheme of the browser.
    sockets
        The sockets of several servers. The method `run` of one of them then serves all.
    """
    with needs_extra("console"):
        from waitress.server import create_server
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
            sockets,
            listen=str(place.address),
            threads=THREADS,
            url_prefix=place.path,
            ident=None,
            max_request_body_size=MOST_RECEIVED_BYTES,
            connection_limit=MOST_CONNECTIONS,
            channel_timeout=IDLE_S,
            cleanup_interval=max(IDLE_S // 6, 1),
            asyncore_use_poll=True,  # `select` is limited to files with low numbers
            **forwarded,
        )
    except (OSError, ValueError) as error:  # a ValueError: the host has no address
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else str(error)
        raise ConfigError(f"cannot listen on {place.address}: {reason}") from error


def serve_apps(
    apps: Mapping[str, tuple[Any, Place]],
    trusted_proxy: str | None,
    announce: Callable[[dict[str, str]], None],
) -> None:
    """Serve until the process gets INT or TERM. `announce` is called with the URL of each name."""
    sockets: dict[int, Any] = {}
    servers = {
        name: make_server(app, place, trusted_proxy, sockets) for name, (app, place) in apps.items()
    }
    # The first process of a container ignores TERM unless it has a handler.
    with signals_to(lambda *_: sys.exit(), signal.SIGTERM):
        announce({name: apps[name][1].url(_port(server)) for name, server in servers.items()})
        try:
            next(iter(servers.values())).run()  # ends after the requests that have begun
        finally:
            for server in servers.values():
                server.task_dispatcher.shutdown()
                server.close()


def _port(server: Any) -> int:
    """Return the port, which a host with several addresses has for each of them."""
    addresses = getattr(server, "effective_listen", None)
    return int(addresses[0][1] if addresses else server.effective_port)


def _address(text: str) -> str:
    """Return an address as the server compares it with that of a peer."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"the trusted proxy is an IP address, not {text!r:.60}") from None


# -- `access`: the users of the console, and the keys of the API ----------------------------------


@click.command(cls=Command)
@click.argument("what", type=click.Choice(["console", "api"]))
@click.argument("name", required=False)
@click.option(
    "--role",
    type=click.Choice(["view", "operate", "admin"]),
    help="Console: each role may do what the one before it may, and more. [view]",
)
@click.option("--password", help="Console: no question. Others on this machine may see it.")
@click.option("--scope", multiple=True, help="API: read, operate, schedule:TAGS, queue:NAMES.")
@_keys_option
@click.option("--remove", is_flag=True, help="Remove the user or the key, from now on.")
@pass_cli
def access(
    cli: Cli, what: str, name: str | None, keys: Path | None, remove: bool, **options: Any
) -> None:
    """Add, list or remove the users of the console, or the keys of the HTTP API.

    \b
    delaytasks access console ann --role operate
    delaytasks access api shop --scope 'schedule:order.*' --scope read
    delaytasks access api shop --remove
    delaytasks access console

    For a user who exists, the command changes the password, and with --role the role. A key is
    printed once, and only its hash is stored. Without a name, the users or keys are listed.
    """
    is_api = what == "api"
    belong_to = {"access console": "role password", "access api": "scope keys"}
    asked = {"access console": not is_api, "access api": is_api}
    check_belongs(belong_to, asked, {**options, "keys": keys})
    file: UserFile | ApiKeyFile
    if is_api:
        file, right = _key_file(cli, keys), "scopes"
    else:
        from delaytasks.console import application

        file, right = application.users_of(cli.delays), "role"
    if name is None:
        if remove or any(options.values()):
            raise click.UsageError("Missing argument 'NAME'.")
        found = [{"name": each, right: entry[right]} for each, entry in file.entries.items()]
        cli.answer(found, Table.of(f"name,rights={right}", found))
        if not found:
            cli.note(f"Nobody has access yet: {file.path} has no name.")
    elif remove:
        if not file.remove(name):
            raise ConfigError(f"{file.path} has no name {name!r:.40}")
        cli.answer({"name": name, "removed": True}, f"removed {name} from {file.path}")
    elif isinstance(file, ApiKeyFile):
        key, entry = file.create(name, options["scope"])
        cli.answer({"name": name, "key": key, "entry": entry}, key)
    else:
        _set_user(cli, file, name, options["role"], options["password"])


def _set_user(cli: Cli, users: UserFile, name: str, role: str | None, password: str | None) -> None:
    from delaytasks.console.requests import Role

    if password is None:
        cli.require_terminal("access asks for the password on a terminal: --password")
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    kept = Role.named(role) if role else users.role(name) or Role.VIEW
    users.set(name, password, kept)
    stored = {"name": name, "role": kept.label}
    cli.answer(stored, f"stored the user {name} with the role {kept.label}")


def _key_file(cli: Cli, path: Path | None) -> ApiKeyFile:
    return ApiKeyFile(path or Path(cli.delays.settings.data_dir).absolute() / API_KEYS)
