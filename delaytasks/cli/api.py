"""`serve` and `api-key`: the HTTP API, and the keys of its callers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.output import print_table
from delaytasks.core.errors import ConfigError
from delaytasks.core.text import needs_extra

if TYPE_CHECKING:
    from delaytasks.http_api.api_keys import ApiKeyFile

API_PORT = 5557
_keys_option = click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of the keys [api-keys.json in delaytasks_data_dir].",
)


@click.command(cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=API_PORT,
    show_default=True,
    help="The port to listen on. 0 takes a free one.",
)
@click.option("--prefix", default="", metavar="PATH", help="The path of the API, as /delays.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    help="The requests that each key may make in a second.",
)
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    help="The address of a proxy with TLS, whose X-Forwarded-For and -Proto are believed.",
)
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
        from delaytasks.http_api.application import make_api
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
