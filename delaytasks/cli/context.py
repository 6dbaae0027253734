"""The parts of every command: the Celery app, its delayed tasks, --json and errors."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import click

from delaytasks.cli.celery_app import import_errors
from delaytasks.cli.hints import Hints
from delaytasks.cli.output import (
    WANTS_JSON,
    Failure,
    is_json,
    print_json,
    say,
    sentence,
    task_json,
)
from delaytasks.core.errors import ConfigError, DelayTaskError, TaskNotFoundError
from delaytasks.core.loop import wait_for_unfinished

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.core.task import DelayTask
    from delaytasks.core.why import Explanation
    from delaytasks.runtime import Runtime
    from delaytasks.storage.database import Database
    from delaytasks.storage.store import Store

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
        found._runtime.store.database.expect_file()  # only `up` and `db upgrade` make one
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
        return self.store.database, settings.table_prefix, settings.table_schema or None

    def _delays_of_app(self) -> DelayTasks | None:
        return getattr(self.app, "delaytasks", None)

    def import_processors(self) -> None:
        """Import the app's modules, as a worker does at its start.

        The processors name the queues of their tags, and `drain` runs them.
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

    def answer_task(self, task: DelayTask, done: str) -> None:
        """Print the task, or a sentence such as "scheduled task 7 (mail): due …"."""
        self.answer(task_json(task), sentence(task, done, self.runtime.clock.now()))

    def explain(
        self, task: DelayTask | str | None, tag: str | None = None, key: str | None = None
    ) -> Explanation:
        """Explain why a task has not run, or how it ended. The key may be that of an ended task."""
        explain = self.runtime.explanations.of
        try:
            explanation = explain(task, tag, key)
        except TaskNotFoundError as error:
            explanation = explain(self._ended(tag, key, error))
        return self.hints.in_explanation(explanation)

    def get(self, id: str | None, tag: str | None, key: str | None) -> DelayTask:
        """Read a task. The key may be that of an ended task."""
        try:
            return self.delays.get(id, tag=tag, key=key)
        except TaskNotFoundError as error:
            return self._ended(tag, key, error)

    def _ended(self, tag: str | None, key: str | None, error: TaskNotFoundError) -> DelayTask:
        """Return the last task that was scheduled with the key, or raise `error`."""
        if tag is None or key is None:
            raise error
        found = self.delays.find(tag=tag, key=key, limit=100, newest_first=True).tasks
        if not found:
            raise error
        return max(found, key=lambda task: (task.create_time or task.expected_time, task.id))

    def note(self, text: str) -> None:
        """Print a line on stderr, unless JSON is asked for."""
        if not self.is_json:
            click.secho(text, fg="yellow", err=True)

    def note_broker_away(self) -> None:
        """Print a note if the broker does not answer. JSON documents have no notes."""
        if self.is_json:
            return
        wiring = self.runtime
        wiring.flush()
        wait_for_unfinished()  # the connection to a distant broker may still be in progress
        if not wiring.timer.is_up:
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


def pass_cli(command: Callable[..., R]) -> Callable[..., R]:
    """Pass the `Cli` to a command as its first argument."""
    return click.make_pass_decorator(Cli)(command)
