"""The parts that commands share: the app, errors, hints that can be copied, answers and signals."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delaytasks.attachment import file_broker_url
from delaytasks.cli.output import NOTED, WANTS_JSON, Failure, Part, is_json, text_of
from delaytasks.model.errors import ConfigError, DelayTaskError
from delaytasks.settings import MESSAGE_FOLDER

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.db.database import Database
    from delaytasks.db.store import Store
    from delaytasks.runtime import Runtime

DEFAULT_APP = "delaytasks.celery"
EXIT_CODES = (
    "Exit codes: 0 it worked; 1 it did not (no such task, too late, database unavailable); "
    "2 wrong usage or settings."
)


# -- Finds the Celery app that the user names, and reports errors of its modules ------------------


def find_app(name: str) -> Any:
    """Return the Celery app that `celery -A name` finds."""
    from celery import Celery
    from celery.app.utils import find_app as find

    # Like `celery`, find modules in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    remedy = "; run the command in the folder of the module, or set PYTHONPATH"
    with import_errors(f"the app {name!r}", [name.partition(":")[0]], remedy):
        try:
            found = find(name)
        except AttributeError as error:
            problem = f"has no Celery app: {error}"
        else:
            if isinstance(found, Celery):
                return found
            problem = f"is no Celery app but a {type(found).__name__}"
    raise ConfigError(f"{name!r} {problem}; name it, as -A package.module:app")


@contextmanager
def import_errors(what: str, modules: Iterable[str], remedy: str = "") -> Iterator[None]:
    """Report an error in a module of the user as a `ConfigError`, with its traceback.

    If one of `modules` is missing, the message ends with `remedy`.
    """
    try:
        yield
    except DelayTaskError:
        raise
    except Exception as error:
        message = f"importing {what} failed: {type(error).__name__}: {error}"
        # If the name of the module or of its package is mistyped, a traceback adds nothing.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if any(f"{module}.".startswith(f"{missing}.") for module in modules):
            message += remedy
        elif not is_json(click.get_current_context()):
            click.echo(traceback.format_exc().rstrip(), err=True)
        raise ConfigError(message) from error


# -- One call of the command line -----------------------------------------------------------------


@dataclass(eq=False)
class Cli:
    """One call of the command line, on one Celery app.

    Parameters
    ----------
    find
        Returns the Celery app.
    command
        The beginning of a command line that the user can copy from a hint.
    app_name
        The app as `celery -A` takes it, for the processes that a command starts. None if the app
        is known only to Flask.
    """

    ctx: click.Context
    find: Callable[[], Any]
    command: str
    app_name: str | None

    def __post_init__(self) -> None:
        self.is_json, self.stdout, ctx = is_json(self.ctx), sys.stdout, self.ctx
        if self.is_json:
            # stdout is for JSON documents, so the user's code must not print there.
            ctx.with_resource(redirect_stdout(sys.stderr))
            # stderr is for one JSON document, so the log must not be printed there.
            logger, silent = logging.getLogger("delaytasks"), logging.NullHandler()
            logger.addHandler(silent)
            ctx.call_on_close(lambda: logger.removeHandler(silent))

    @functools.cached_property
    def app(self) -> Any:
        return self.find()

    @functools.cached_property
    def delays(self) -> DelayTasks:
        """The `DelayTasks` of the Celery app."""
        if getattr(self.app, "delaytasks", None) is None:
            self.import_processors()  # a module that only workers import may make it
        found = getattr(self.app, "delaytasks", None)
        if found is None:
            raise ConfigError(
                f"the Celery app {self.app.main or '(unnamed)'!r} has no delayed tasks; "
                "make one with DelayTasks(app) where the app is made"
            )
        data_dir, conf = found.settings.data_dir, self.app.conf
        if conf.broker_url is None and Path(data_dir, MESSAGE_FOLDER).is_dir():
            conf.broker_url = file_broker_url(data_dir)  # that of `up`
        self.ctx.call_on_close(found.close)
        return found  # type: ignore[no-any-return]

    @property
    def runtime(self) -> Runtime:
        """The objects behind `delays`."""
        return self.delays._runtime

    @property
    def store(self) -> Store:
        return self.runtime.store

    @property
    def tables(self) -> tuple[Database, str, str | None]:
        """The database, and the prefix and the schema of its tables."""
        settings = self.delays.settings
        return self.store.database, settings.name_prefix, settings.table_schema or None

    def import_processors(self) -> None:
        """Import the app's modules, as a worker does at its start.

        The processors name the queues of their tags, and `run` runs them.
        """
        modules: set[str] = set()
        with import_errors("what the app's imports and include name", modules):
            modules.update(self.app.loader.default_modules)  # this reads the app's configuration
            self.app.loader.import_default_modules()

    def require_terminal(self, reason: str) -> None:
        """Raise a usage error unless the user can be asked."""
        if self.is_json or not sys.stdin.isatty():
            raise click.UsageError(reason)

    def confirm(self, is_confirmed: bool, question: str, reason: str) -> None:
        """Ask the user, or raise a usage error if there is no terminal."""
        if not is_confirmed:
            self.require_terminal(reason)
            click.confirm(question, abort=True, err=True)

    def answer(self, document: Any, *parts: Part) -> None:
        """Print the JSON document if the user asked for it, or else the text of the parts."""
        if self.is_json:
            self.print_json(document, indent=2)
        elif text := text_of(parts):
            click.echo(text)

    def print_json(self, document: Any, indent: int | None = None) -> None:
        text = json.dumps(document, indent=indent, allow_nan=False)
        click.echo(text, file=self.stdout)

    def note(self, text: str) -> None:
        """Print a line on stderr, unless JSON is asked for."""
        if not self.is_json:
            click.secho(text, fg=NOTED, err=True)

    def rewrite(self, message: str) -> str:
        """Return the message with its commands and options as the user would type them.

        Messages are written without knowledge of the caller, and name a command as `delaytasks
        rerun`, `delaytasks -A APP db` or `flask --app APP delays db`. The user may have called
        `delaytasks -A shop`, or `celery -A shop delays`.
        """
        message = re.sub(r"celery -A … worker(?: -Q \S+)?", self._worker_command, message)
        group = self.ctx.command
        names = group.list_commands(self.ctx) if isinstance(group, click.Group) else []
        ours = rf"(?:delaytasks (?:-A APP )?|flask --app APP delays )(?=(?:{'|'.join(names)})\b)"
        return re.sub(rf"\b{ours}", lambda _: f"{self.command} ", message)

    def _worker_command(self, found: re.Match[str]) -> str:
        """Return what starts a worker here, in place of `celery -A … worker`."""
        if self.delays.settings.timer_kind == "direct":
            return f"{self.command} run --forever"
        # A Django project may have an app of its own, under any name.
        if self.app_name is None or "manage.py" in self.command:
            return found[0]
        if self.app.conf.broker_url in (None, file_broker_url(self.delays.settings.data_dir)):
            return f"{self.command} up"
        return found[0].replace("…", self.app_name)


#: Passes the `Cli` to a command as its first argument.
pass_cli: Callable[[Callable[..., Any]], Callable[..., Any]] = click.make_pass_decorator(Cli)


# -- Commands, with the option --json and exit codes ----------------------------------------------


class Command(click.Command):
    """A command with the option --json, whose help ends with its exit codes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"epilog": EXIT_CODES, **options})
        about = "Print one JSON document."
        self.params.append(click.Option(["--json"], is_flag=True, expose_value=False, help=about))


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command


class RootGroup(Group):
    """A group that reports all errors in the same way, by exit code and in JSON if asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # An error may come before click has read the options of the command.
        ctx.meta[WANTS_JSON] = "--json" in (args[: args.index("--")] if "--" in args else args)
        with _reported_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _reported_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def _reported_errors(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except (click.UsageError, DelayTaskError) as error:
        if isinstance(error, click.UsageError) and not is_json(ctx):
            raise
        cli = ctx.find_object(Cli)
        raise Failure(error, is_json(ctx), cli.rewrite if cli else str) from error


def check_belongs(
    options_of: Mapping[str, str], asked: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Raise a usage error if an option is given without the one that it belongs to.

    Parameters
    ----------
    options_of
        The names of the options, separated by spaces, that belong to each key of `asked`.
    asked, given
        The options that the user gave, and the values of the others by name.
    """
    for owner, names in options_of.items():
        for name in names.split():
            if given[name] not in (None, False, ()) and not asked[owner]:
                raise click.UsageError(f"--{name.replace('_', '-')} requires {owner}")


@contextmanager
def signals_to(handle: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Let a function handle these signals. In another thread than the main one, none is handled."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
