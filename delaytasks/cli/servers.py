"""Commands that serve pages, the HTTP API and metrics, and manage who may use them."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.output import print_json, print_table, say
from delaytasks.core.errors import ConfigError
from delaytasks.core.text import needs_extra
from delaytasks.metrics.files import NAMES, read_file
from delaytasks.runtime import runtime_of

if TYPE_CHECKING:
    from delaytasks.http_api.api_keys import ApiKeyFile


API_PORT = 5557
_keys_option = click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of the keys [api-keys.json in delaytasks_data_dir].",
)
_trusted_proxy = click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    help="The address of a proxy with TLS, whose X-Forwarded-For and -Proto are believed.",
)


def _listens_at(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    host = click.option(
        "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
    )
    port = click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=default,
        show_default=True,
        help="The port to listen on. 0 takes a free one.",
    )
    return lambda command: host(port(command))


@click.command(cls=Command)
@_listens_at(API_PORT)
@click.option("--prefix", default="", metavar="PATH", help="The path of the API, as /delays.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    help="The requests that each key may make in a second.",
)
@_trusted_proxy
@_keys_option
@pass_cli
def serve(
    cli: Cli,
    host: str,
    port: int,
    prefix: str,
    rate: float,
    trusted_proxy: str | None,
    keys: Path | None,
) -> None:
    """Serve the HTTP API, for programs in other languages.

    \b
    delaytasks serve
    """
    with needs_extra("api"):
        from delaytasks.http_api.routes import make_api
        from delaytasks.serving import serve_at
    cli.import_processors()
    app = make_api(cli.delays, _key_file(cli, keys), requests_per_s=rate)
    serve_at(
        app, host, port, prefix, trusted_proxy, lambda url: click.echo(f"HTTP API at {url} ready.")
    )


@click.group("api-key", cls=Group)
def api_key() -> None:
    """The keys of the HTTP API.

    \b
    delaytasks api-key create shop --scope 'schedule:order.*'
    delaytasks api-key list
    """


@api_key.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    metavar="SCOPE",
    help="read, operate, or schedule:PATTERN. Repeatable.",
)
@_keys_option
@pass_cli
def create(cli: Cli, name: str, scopes: tuple[str, ...], keys: Path | None) -> None:
    """Make a key and print it once. Only its hash is stored.

    \b
    delaytasks api-key create shop --scope 'schedule:order.*' --scope read
    """
    key, entry = _key_file(cli, keys).create(name, scopes)
    cli.answer({"name": name, "key": key, "entry": entry}, key)


@api_key.command("list")
@_keys_option
@pass_cli
def list_(cli: Cli, keys: Path | None) -> None:
    """List the names and scopes of the keys.

    \b
    delaytasks api-key list
    """
    entries = _key_file(cli, keys).entries
    scopes = {name: list(entry["scopes"]) for name, entry in entries.items()}
    if cli.is_json:
        cli.answer([{"name": name, "scopes": each} for name, each in scopes.items()], "")
    elif scopes:
        print_table(["name", "scopes"], [(name, " ".join(each)) for name, each in scopes.items()])
    else:
        cli.note("No API keys.")


@api_key.command()
@click.argument("name")
@_keys_option
@pass_cli
def remove(cli: Cli, name: str, keys: Path | None) -> None:
    """Remove a key. Its requests are refused from now on.

    \b
    delaytasks api-key remove shop
    """
    file = _key_file(cli, keys)
    if not file.remove(name):
        raise ConfigError(f"{file.path} has no API key {name!r:.40}")
    cli.answer({"name": name, "removed": True}, f"removed the API key {name}")


def _key_file(cli: Cli, path: Path | None) -> ApiKeyFile:
    from delaytasks.http_api.api_keys import API_KEYS, ApiKeyFile

    return ApiKeyFile(path or Path(cli.delays.settings.data_dir).absolute() / API_KEYS)


# -- `console` and `console-user`: the web pages for operators, and who may log in ----------------


PORT = 5556
_ROLES = ["view", "operate", "admin"]


@click.command(cls=Command)
@_listens_at(PORT)
@click.option("--prefix", default="", metavar="PATH", help="The path of the console, as /delays.")
@click.option(
    "--proxy-header",
    metavar="NAME",
    help="A proxy authenticates, and names the user in this header, as X-Forwarded-User.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="With --proxy-header: the address or network of the proxy. Repeatable. [127.0.0.1, ::1]",
)
@_trusted_proxy
@pass_cli
def console(
    cli: Cli,
    host: str,
    port: int,
    prefix: str,
    proxy_header: str | None,
    proxies: tuple[str, ...],
    trusted_proxy: str | None,
) -> None:
    """Serve the console: web pages that show whether tasks run on time, and repair what failed.

    \b
    delaytasks console
    delaytasks console --port 8080 --proxy-header X-Forwarded-User

    The first start generates a password and prints it once. Further users: delaytasks console-user.
    """
    if proxy_header is not None and trusted_proxy is not None:
        # --proxy is compared with the address that --trusted-proxy replaces by the browser's.
        raise ConfigError("--proxy-header and --trusted-proxy cannot be combined")
    with needs_extra("console"):
        from delaytasks.console import application
        from delaytasks.serving import serve_at
    access = None
    if proxy_header is not None:
        access = application.proxy_access(cli.delays, proxy_header, proxies or ("127.0.0.1", "::1"))
    cli.import_processors()
    app = application.standalone(cli.delays, click.echo, access)
    serve_at(
        app, host, port, prefix, trusted_proxy, lambda url: click.echo(f"console at {url} ready.")
    )


@click.command("console-user", cls=Command)
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(_ROLES),
    default="view",
    show_default=True,
    help="The role of the user. Each role may do what the one before it may, and more.",
)
@click.option("--remove", is_flag=True, help="Remove the user.")
@click.option("--password", help="Instead of a question. Other users of this machine may see it.")
@pass_cli
def console_user(cli: Cli, name: str, role: str, remove: bool, password: str | None) -> None:
    """Add a user of the console, change a password or a role, or remove a user.

    \b
    delaytasks console-user ann --role operate
    delaytasks console-user ann --remove
    """
    with needs_extra("console"):
        from delaytasks.console import application
        from delaytasks.console.viewers import Role
    users = application.users_of(cli.delays)
    if remove:
        if not users.remove(name):
            raise ConfigError(f"{users.path} has no user {name!r:.40}")
        cli.answer({"user": name, "removed": True}, f"removed the user {name}")
        return
    if password is None:
        cli.require_terminal(False, "console-user asks for the password on a terminal: --password")
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    users.set(name, password, Role.named(role))
    cli.answer({"user": name, "role": role}, f"stored the user {name} with the role {role}")


# -- `exporter`: serve the metrics of the databases to Prometheus ---------------------------------


logger = logging.getLogger(__name__)

#: Prometheus scrapes this port.
EXPORTER_PORT = 9819


@click.command(cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=EXPORTER_PORT,
    show_default=True,
    help="The port to listen at.",
)
@click.option(
    "--print",
    "printed",
    type=click.Choice(sorted(NAMES)),
    help="Print the Grafana dashboard or the alert rules of this version, and end.",
)
@pass_cli
def exporter(cli: Cli, host: str, port: int, printed: str | None) -> None:
    """Serve metrics of the databases, the broker and the timer to Prometheus.

    \b
    delaytasks exporter --host 0.0.0.0
    delaytasks exporter --print rules > delaytasks-rules.yml
    """
    if printed is not None:
        click.echo(read_file(printed), nl=False)
        return
    from delaytasks.metrics.prometheus import serve  # needs the extra `prometheus`
    from delaytasks.metrics.snapshot import DatabaseMetrics

    try:
        cli.import_processors()  # a forecast asks how many tasks a process runs concurrently
    except Exception:
        logger.exception("the forecast does not know the processors; all other metrics are served")
    source, stopping = DatabaseMetrics(runtime_of(cli.delays)), threading.Event()
    try:
        server = serve(host, port, source)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics at {host}:{port}: {error}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    url = f"http://{host}:{port}/metrics"
    if cli.is_json:
        print_json({"url": url})
    else:
        say(f"metrics at {url}")
    stopping.wait()
    server.stop()
