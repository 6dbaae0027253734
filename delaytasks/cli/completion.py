"""`completion`: the script with which a shell completes the command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from delaytasks.cli.context import Cli, Command, pass_cli


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@pass_cli
def completion(cli: Cli, shell: str) -> None:
    """Print the script with which a shell completes commands, options and their values.

    \b
    delaytasks completion bash > ~/.local/share/bash-completion/completions/delaytasks
    delaytasks completion zsh > "${fpath[1]}/_delaytasks"
    delaytasks completion fish > ~/.config/fish/completions/delaytasks.fish

    A new shell uses it. The script starts delaytasks at each request, so it also knows the commands
    of later versions. Under Celery, celery -A proj delays has no completion.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    command = click.get_current_context().command
    script = kind(command, {}, "delaytasks", "_DELAYTASKS_COMPLETE").source()
    cli.answer({"shell": shell, "script": script}, script)
