"""What every command needs: the Celery app, its delayed tasks, and how to tell of errors."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from delaytasks.cli.output import failure_of
from delaytasks.core.bounded_calls import wait_for_unfinished
from delaytasks.core.errors import ConfigError, DelayTaskError
from delaytasks.core.masking import mask_url

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.storage.store import Store

R = TypeVar("R")
_CLI = "delaytasks.cli"
_JSON = "delaytasks.json"
EXIT_CODES = "Exit codes: 0 it worked; 1 it did not (no such task, too late, database away); 2 wrong usage or settings."


class Cli:
    """One call of the command line, on one Celery app."""

    def __init__(
        self, ctx: click.Context, find: Callable[[], Any], command: str, app_origin: str
    ) -> None:
        self._ctx = ctx
        self._find = find
        self.app_origin = app_origin
        #: How the commands are called here, for hints that can be copied.
        self.command = command
        self.is_json = bool(ctx.meta.get(_JSON))
        if self.is_json:
            # Nobody reads our log there, and stderr is for one JSON document.
            logger, silent = logging.getLogger("delaytasks"), logging.NullHandler()
            logger.addHandler(silent)
            ctx.call_on_close(lambda: logger.removeHandler(silent))

    @functools.cached_property
    def app(self) -> Any:
        with self.guarded_stdout():
            return self._find()

    @functools.cached_property
    def delays(self) -> DelayTasks:
        """The `DelayTasks` of the app: what its `delaytasks.run` task belongs to."""
        found = self._delays_of_app()
        if found is None:
            self.import_processors()  # it may be made in a module that only workers import
            found = self._delays_of_app()
        if found is None:
            raise ConfigError(
                f"the Celery app {self.app.main or '(unnamed)'!r} has no delayed tasks; "
                "make one with DelayTasks(app) where the app is made"
            )
        self._ctx.call_on_close(found.close)
        for store in found.routes.databases.stores:
            store.database.expect_file()  # only `up` and `db upgrade` make one
        return found

    @property
    def stores(self) -> Sequence[Store]:
        """Of all databases, also of those that do not know their number yet."""
        return self.delays.routes.databases.stores

    @property
    def database_url(self) -> str:
        """Those of all, without passwords, which may stand among their options too."""
        return ", ".join(map(shown_url, self.stores))

    def _delays_of_app(self) -> DelayTasks | None:
        return getattr(self.app.tasks.get("delaytasks.run"), "delays", None)

    def import_processors(self) -> None:
        """As a worker does at its start: processors bring their queues, and are what `drain` runs."""
        modules: set[str] = set()
        with (
            _telling_of_imports("what the app's imports and include name", modules),
            self.guarded_stdout(),
        ):
            modules.update(
                self.app.loader.default_modules
            )  # in here, since it reads the app's configuration
            self.app.loader.import_default_modules()

    def guarded_stdout(self) -> AbstractContextManager[Any]:
        """Other people's code may print, and stdout is for one JSON document."""
        return redirect_stdout(sys.stderr) if self.is_json else nullcontext()

    def note(self, text: str) -> None:
        """For people only."""
        if not self.is_json:
            click.secho(text, fg="yellow", err=True)

    def note_broker_away(self) -> None:
        wait_for_unfinished()  # the connection to a broker that is far away may still be under way
        if not self.delays.timer.is_up:
            self.note(
                "The broker can not be reached: the database has the task, and a sweep will send it."
            )


def shown_url(store: Store) -> str:
    return mask_url(store.database.url.render_as_string(hide_password=True))


def find_app(name: str) -> Any:
    """The Celery app that `celery -A name` finds."""
    from celery import Celery
    from celery.app.utils import find_app as find

    # As `celery` itself does: modules where the command is started count.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _telling_of_imports(f"the app {name!r}", [name.partition(":")[0]]):
        try:
            found = find(name)
        except AttributeError as error:
            raise ConfigError(
                f"{name!r} has no Celery app: {error}; name it, as -A package.module:app"
            ) from None
    if not isinstance(found, Celery):
        raise ConfigError(
            f"{name!r} is no Celery app but a {type(found).__name__}; name it, as -A package.module:app"
        )
    return found


@contextmanager
def _telling_of_imports(what: str, modules: Iterable[str]) -> Iterator[None]:
    """An error in somebody's module ends the command like a wrong setting, and says where it happened."""
    try:
        yield
    except DelayTaskError:
        raise
    except Exception as error:
        message = f"importing {what} failed: {type(error).__name__}: {error}"
        # Where the name of a module, or of its package, is mistyped, a traceback would tell nothing.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_name_wrong = any(f"{module}.".startswith(f"{missing}.") for module in modules)
        is_json = bool(click.get_current_context().meta.get(_JSON))
        raise failure_of(
            ConfigError(message), is_json, "" if is_name_wrong else traceback.format_exc()
        ) from error


class Commands(click.Group):
    """A group whose errors are all told in the same way, by exit code and in JSON where that is asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Looked for here, since an error may come before the command's own options are read.
        ctx.meta[_JSON] = "--json" in (args[: args.index("--")] if "--" in args else args)
        with _telling_of_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _telling_of_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def _telling_of_errors(ctx: click.Context) -> Iterator[None]:
    is_json = bool(ctx.meta.get(_JSON))
    try:
        yield
    except DelayTaskError as error:
        raise failure_of(error, is_json) from error
    except click.UsageError as error:
        if not is_json:
            raise
        raise failure_of(error, is_json) from error


json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON document."
)


def pass_cli(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command the `Cli` as its first argument, and the option --json."""

    @json_option
    @click.pass_context
    @functools.wraps(function)
    def with_cli(ctx: click.Context, /, *args: Any, **kwargs: Any) -> R:
        return function(cli_of(ctx), *args, **kwargs)

    return with_cli


_ORIGINS: dict[ParameterSource | None, str] = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
}


def _program() -> str:
    """What a shell needs to call this program again: its name, or its path if the name is not on the PATH."""
    path = sys.argv[0]
    if os.path.basename(path) != "delaytasks":  # a test, or `python -m delaytasks`
        return "delaytasks"
    found = shutil.which("delaytasks")
    return (
        "delaytasks" if found is not None and os.path.samefile(found, path) else shlex.quote(path)
    )


def open_cli(ctx: click.Context, app: str) -> None:
    """For `delaytasks -A app …`."""
    origin = _ORIGINS.get(ctx.get_parameter_source("app"), "default")
    command = f"{_program()} -A {shlex.quote(app)}" if origin == "command line" else _program()
    ctx.meta[_CLI] = Cli(ctx, lambda: find_app(app), command, origin)


def open_cli_under_celery(ctx: click.Context) -> None:
    """For `celery -A proj delays …`: Celery has found the app."""
    if ctx.obj.no_color:
        ctx.color = False
    app = ctx.obj.app
    name = ctx.parent.params.get("app") if ctx.parent is not None else None
    command = f"celery -A {shlex.quote(name)} delays" if isinstance(name, str) else "celery delays"
    ctx.meta[_CLI] = Cli(ctx, lambda: app, command, "celery")


def cli_of(ctx: click.Context) -> Cli:
    cli: Cli = ctx.meta[_CLI]
    return cli
