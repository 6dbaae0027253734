"""What the commands share: the app, its options, hints after errors and progress."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from delaytasks.cli.output import WANTS_JSON, Failure, is_json, print_json, say
from delaytasks.model.errors import ConfigError, DelayTaskError, TaskNotFoundError

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.client import DelayTasks
    from delaytasks.db.database import Database
    from delaytasks.db.store import Store
    from delaytasks.model.task import DelayedTask
    from delaytasks.runtime import Runtime


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
            raise ConfigError(
                f"{name!r} has no Celery app: {error}; name it, as -A package.module:app"
            ) from None
    if not isinstance(found, Celery):
        kind = type(found).__name__
        raise ConfigError(
            f"{name!r} is no Celery app but a {kind}; name it, as -A package.module:app"
        )
    return found


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
        is_name_wrong = any(f"{module}.".startswith(f"{missing}.") for module in modules)
        details = "" if is_name_wrong else traceback.format_exc()
        message += remedy if is_name_wrong else ""
        ctx = click.get_current_context()
        raise Failure(ConfigError(message), is_json(ctx), details) from error


# -- Rewrites the commands in messages as the user called the command line ------------------------


class Hints:
    """Makes hints that the user can copy.

    Messages are written without knowledge of the caller, and name a command as `delaytasks rerun`,
    `delaytasks -A APP db` or `flask --app APP delays db`. The user may have called `delaytasks -A
    shop`, or `celery -A shop delays`.

    Parameters
    ----------
    command
        The beginning of the user's command line.
    names
        The names of all commands.
    app
        The Celery app if the user has named it.
    """

    def __init__(self, command: str, names: Collection[str], app: str | None = None) -> None:
        self.command = command
        self._app = app
        any_name = "|".join(map(re.escape, names))
        self._pattern = re.compile(
            rf"(?<!-m )\b(?:delaytasks (?:-A APP )?|flask --app APP delays )(?=(?:{any_name})\b)"
        )

    def rewrite(self, message: str) -> str:
        """Return the message with its commands and options as the user would type them."""
        if self._app is not None:
            message = message.replace("celery -A … ", f"celery -A {self._app} ")
        message = message.replace("by tag= and key=", "by --tag and --key")
        return self._pattern.sub(lambda _: f"{self.command} ", message)


R = TypeVar("R")
DEFAULT_APP = "delaytasks.celery"
EXIT_CODES = (
    "Exit codes: 0 it worked; 1 it did not (no such task, too late, database unavailable); "
    "2 wrong usage or settings."
)


class Cli:
    """One call of the command line, on one Celery app."""

    def __init__(
        self,
        ctx: click.Context,
        find: Callable[[], Any],
        command: str,
        app_name: str,
        app_origin: str,
    ) -> None:
        self._ctx = ctx
        self._find = find
        #: The app as `celery -A` takes it, for the processes that a command starts.
        self.app_name = app_name
        self.app_origin = app_origin
        #: The beginning of a command line that the user can copy from a hint.
        self.command = command
        names = ctx.command.list_commands(ctx) if isinstance(ctx.command, click.Group) else ()
        self.hints = Hints(command, names, None if app_origin == "default" else app_name)
        self.is_json = is_json(ctx)
        if self.is_json:
            # stderr is for one JSON document, so the log must not be printed there.
            logger, silent = logging.getLogger("delaytasks"), logging.NullHandler()
            logger.addHandler(silent)
            ctx.call_on_close(lambda: logger.removeHandler(silent))

    @functools.cached_property
    def app(self) -> Any:
        with self.guarded_stdout():
            return self._find()

    @functools.cached_property
    def delays(self) -> DelayTasks:
        """The `DelayTasks` of the Celery app."""
        found = self._delays_of_app()
        if found is None:
            self.import_processors()  # a module that only workers import may make it
            found = self._delays_of_app()
        if found is None:
            raise ConfigError(
                f"the Celery app {self.app.main or '(unnamed)'!r} has no delayed tasks; "
                "make one with DelayTasks(app) where the app is made"
            )
        self._ctx.call_on_close(found.close)
        return found

    @property
    def runtime(self) -> Runtime:
        """The objects behind `delays`."""
        return self.delays._runtime

    @property
    def store(self) -> Store:
        return self.runtime.store

    @property
    def database_url(self) -> str:
        """The URL of the database, without the password."""
        return self.store.database.shown_url

    @property
    def tables(self) -> tuple[Database, str, str | None]:
        """The database, and the prefix and the schema of its tables."""
        settings = self.delays.settings
        return self.store.database, settings.name_prefix, settings.table_schema or None

    def _delays_of_app(self) -> DelayTasks | None:
        return getattr(self.app, "delaytasks", None)

    def import_processors(self) -> None:
        """Import the app's modules, as a worker does at its start.

        The processors name the queues of their tags, and `run` runs them.
        """
        modules: set[str] = set()
        with (
            import_errors("what the app's imports and include name", modules),
            self.guarded_stdout(),
        ):
            modules.update(self.app.loader.default_modules)  # this reads the app's configuration
            self.app.loader.import_default_modules()

    def guarded_stdout(self) -> AbstractContextManager[Any]:
        """Redirect what the user's code prints to stderr where stdout is for one JSON document."""
        return redirect_stdout(sys.stderr) if self.is_json else nullcontext()

    def require_terminal(self, is_confirmed: bool, reason: str) -> None:
        """Raise a usage error unless the user has confirmed, or can be asked."""
        if not is_confirmed and (self.is_json or not sys.stdin.isatty()):
            raise click.UsageError(reason)

    def confirm(self, is_confirmed: bool, question: str) -> None:
        if not is_confirmed:
            click.confirm(question, abort=True, err=True)

    def answer(self, document: Any, text: str) -> None:
        """Print the JSON document if the user asked for it, or else the text."""
        if self.is_json:
            print_json(document)
        else:
            say(text)

    def get(self, id: str | None, tag: str | None, key: str | None) -> DelayedTask:
        """Read a task. If no live task has the key, read the last one that had it."""
        try:
            return self.delays.get(id, tag=tag, key=key)
        except TaskNotFoundError:
            if tag is None or key is None:
                raise
            found = self.delays.find(tag=tag, key=key, limit=100, newest_first=True).tasks
            if not found:
                raise
            return max(found, key=lambda task: (task.create_time or task.expected_time, task.id))

    def note(self, text: str) -> None:
        """Print a line on stderr, unless JSON is asked for."""
        if not self.is_json:
            click.secho(text, fg="yellow", err=True)

    def note_broker_away(self) -> None:
        """Print a note if the broker does not answer. JSON documents have no notes."""
        if self.is_json:
            return
        runtime = self.runtime
        runtime.flush()
        if not runtime.timer.is_up:
            self.note(
                "The broker cannot be reached: the database has the task, and a sweep will send it."
            )


class Command(click.Command):
    """A command with the option --json, whose help ends with its exit codes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"epilog": EXIT_CODES, **options})
        self.params.append(_json_option())

    def get_help(self, ctx: click.Context) -> str:
        return _rewritten(ctx, super().get_help(ctx))


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"epilog": EXIT_CODES, **options})

    def get_help(self, ctx: click.Context) -> str:
        return _rewritten(ctx, super().get_help(ctx))


class RootGroup(Group):
    """A group that reports all errors in the same way, by exit code and in JSON if asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(_json_option())

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
    except click.UsageError as error:
        if not is_json(ctx):
            raise
        raise Failure(error, True) from error
    except DelayTaskError as error:
        raise Failure(error, is_json(ctx), rewrite=functools.partial(_rewritten, ctx)) from error


def _rewritten(ctx: click.Context, message: str) -> str:
    cli = ctx.find_object(Cli)
    return message if cli is None else cli.hints.rewrite(message)


def _json_option() -> click.Option:
    return click.Option(
        ["--json"], is_flag=True, expose_value=False, help="Print one JSON document."
    )


def check_belongs(
    options_of: Mapping[str, str], asked: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Raise a usage error if an option is given without the one that it belongs to.

    Parameters
    ----------
    options_of
        The names of the options, separated by spaces, that belong to each key of `asked`.
    asked, given
        What the user asked for, and the values of the options by name.
    """
    for owner, names in options_of.items():
        for name in names.split():
            if given[name] not in (None, False, ()) and not asked[owner]:
                raise click.UsageError(f"--{name.replace('_', '-')} requires {owner}")


def pass_cli(command: Callable[..., R]) -> Callable[..., R]:
    """Pass the `Cli` to a command as its first argument."""
    return click.make_pass_decorator(Cli)(command)


# -- Prepare a call of the command line: by itself, under `celery`, or under `flask` --------------


_ORIGINS: dict[ParameterSource | None, str] = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
}


def _program() -> str:
    """Return this program's name, or its path if the shell would not find the name on the PATH."""
    path = sys.argv[0]
    if path.endswith(os.path.join("delaytasks", "__main__.py")):
        return "python -m delaytasks"
    if os.path.basename(path) != "delaytasks":  # a test
        return "delaytasks"
    found = shutil.which("delaytasks")
    is_on_path = found is not None and os.path.samefile(found, path)
    return "delaytasks" if is_on_path else shlex.quote(path)


def open_cli(ctx: click.Context, app: str) -> None:
    """Prepare `delaytasks -A app …`."""
    origin = _ORIGINS.get(ctx.get_parameter_source("app"), "default")
    command = f"{_program()} -A {shlex.quote(app)}" if origin == "command line" else _program()
    ctx.obj = Cli(ctx, lambda: find_app(app), command, app, origin)


def open_cli_under_celery(ctx: click.Context) -> None:
    """Prepare `celery -A proj delays …`, for which Celery has found the app."""
    if ctx.obj.no_color:
        ctx.color = False
    app = ctx.obj.app
    name = ctx.parent.params.get("app") if ctx.parent is not None else None
    command = f"celery -A {shlex.quote(name)} delays" if isinstance(name, str) else "celery delays"
    app_name = name if isinstance(name, str) else DEFAULT_APP
    ctx.obj = Cli(ctx, lambda: app, command, app_name, "celery")


def open_cli_under_flask(ctx: click.Context) -> None:
    """Prepare `flask --app proj delays …`. No application context surrounds the command.

    In an application context, calls would be part of the transaction of `db.session`.
    """
    info = ctx.obj
    path = info.app_import_path
    command = f"flask --app {shlex.quote(path)} delays" if path else "flask delays"
    ctx.obj = Cli(ctx, lambda: _celery_of_flask(info.load_app()), command, DEFAULT_APP, "flask")


def _celery_of_flask(app: Any) -> Any:
    delays = app.extensions.get("delaytasks")
    if delays is None:
        raise ConfigError(
            f"the Flask app {app.name!r} has no delayed tasks; call init_app(app) of a FlaskDelays "
            "where the app is made"
        )
    return delays._runtime.celery


# -- The progress of a command on a terminal, and Ctrl-C between two steps ------------------------


def progress_bar(cli: Cli, text: str) -> Progress:
    """Return a progress bar on stderr, followed by `text`, a template of the task's fields."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=console,
        disable=cli.is_json or not console.is_terminal,
        transient=True,
    )


def moved_bar(cli: Cli, done: str) -> Progress:
    """Return a progress bar whose task has a field `moved`, the number of tasks `done`."""
    return progress_bar(cli, f"{{task.fields[moved]:,}} tasks {done}")


@contextmanager
def stopping_between_steps() -> Iterator[Callable[[], None]]:
    """Let the current step end after Ctrl-C; a second Ctrl-C ends it immediately.

    The command calls the yielded function after each step. It raises `KeyboardInterrupt` after
    Ctrl-C.
    """
    is_stopped = False

    def check() -> None:
        if is_stopped:
            raise KeyboardInterrupt

    def stop(_number: int, _frame: Any) -> None:
        nonlocal is_stopped
        check()
        is_stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
