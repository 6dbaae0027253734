"""`console` and `console-user`: the web pages for operators, and who may log in."""

from __future__ import annotations

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.core.errors import ConfigError
from delaytasks.core.text import needs_extra

PORT = 5556
_ROLES = ["view", "operate", "admin"]


@click.command(cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="The port to listen on. 0 takes a free one.",
)
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
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    help="The address of a proxy with TLS, whose X-Forwarded-For and -Proto are believed.",
)
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
