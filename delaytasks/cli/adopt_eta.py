"""`adopt-eta`: move Celery messages with an eta from the broker to the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from kombu.exceptions import OperationalError

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import cell, count, print_json, print_table, say
from delaytasks.cli.progress import moved_bar, stopping_between_steps
from delaytasks.cli.times import show_instant
from delaytasks.core.clock import monotonic
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import ConfigError, DelayTaskError
from delaytasks.operations.eta_adoption import EtaAdoption
from delaytasks.timers.broker_link import bounded_connection
from delaytasks.wiring import wiring_of

if TYPE_CHECKING:
    from delaytasks.durable_eta.broker_queues import BrokerQueues, QueueWorker

#: The messages that are in memory together, and the rows of one transaction.
BATCH = 200
#: The time limit for each answer of the broker.
BROKER_LIMIT_S = 10.0
_STAY = {
    "no_eta": "without an eta",
    "not_durable": "of calls that do not become rows (durable_eta, durable_eta_min_s)",
    "unreadable": "unreadable",
    "refused": "refused",
}


@click.command("adopt-eta", cls=Command)
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Only this queue. Repeatable. [default: the queues of the app and of its tasks]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this number of messages.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only count the messages.")
@click.option(
    "--force", "is_forced", is_flag=True, help="Adopt messages although workers consume the queues."
)
@pass_cli
def adopt_eta(
    cli: Cli, queues: tuple[str, ...], limit: int | None, is_dry_run: bool, is_forced: bool
) -> None:
    """Move the messages with an eta that wait in Redis or RabbitMQ into the table.

    \b
    delaytasks adopt-eta --dry-run
    delaytasks adopt-eta

    Stop the workers first: a worker keeps messages with an eta in its memory. A message becomes a
    row if a call with its eta would (settings durable_eta and durable_eta_min_s). All other
    messages stay in their queue. The command may be interrupted and repeated.
    """
    cli.import_processors()
    began, wiring = monotonic(), wiring_of(cli.delays)
    adoption = EtaAdoption(wiring.celery, wiring.celery_tasks, wiring.router, is_dry_run, limit)
    with _broker(cli) as connection:
        from delaytasks.durable_eta.broker_queues import BrokerQueues

        broker = BrokerQueues(cli.app, connection, queues)
        if missing := set(queues).difference(broker.present):
            raise ConfigError(f"RabbitMQ has no queue {', '.join(map(repr, sorted(missing)))}")
        workers = broker.workers()
        if not (is_dry_run or is_forced):
            _refuse_running(workers, broker.consumers())
        # A worker runs the messages in its memory, even if they are removed from `unacked`. With
        # --force there may be workers that do not answer.
        has_unacked = is_dry_run or not (workers or is_forced)
        is_stopped = _adopt(cli, adoption, broker, has_unacked)
    run = _Run(adoption, broker.present, workers, is_dry_run, is_stopped, monotonic() - began)
    if cli.is_json:
        print_json(_document(run))
    else:
        _print(cli, run)
    if is_stopped:
        sys.exit(1)


class _Run(NamedTuple):
    """The result of a call of the command."""

    adoption: EtaAdoption
    queues: Sequence[str]
    workers: Sequence[QueueWorker]
    is_dry_run: bool
    is_stopped: bool
    seconds: float


@contextmanager
def _broker(cli: Cli) -> Iterator[Any]:
    """Yield a connection to the broker, whose errors become `DelayTaskError`."""
    address = cli.app.connection_for_write().as_uri()
    try:
        connection = bounded_connection(
            cli.app, BROKER_LIMIT_S, connect_step_s=BROKER_LIMIT_S, read_timeout=BROKER_LIMIT_S
        )
    except (OperationalError, OSError) as error:
        raise DelayTaskError(f"the broker {address} cannot be reached: {error}") from error
    with connection:
        try:
            yield connection
        except connection.connection_errors + connection.channel_errors as error:
            raise DelayTaskError(
                f"the broker {address} failed ({type(error).__name__}: {error}); no message is "
                "lost: run the command again"
            ) from error


def _refuse_running(workers: Sequence[QueueWorker], consumers: dict[str, int]) -> None:
    if workers:
        held = "; ".join(map(_held, workers))
        raise DelayTaskError(f"workers are running: stop them, or pass --force ({held})")
    if consumers:
        found = ", ".join(f"{queue} ({number})" for queue, number in consumers.items())
        raise DelayTaskError(
            f"RabbitMQ has consumers of the queues {found}, although no worker answers: stop them, "
            "or pass --force"
        )


def _held(worker: QueueWorker) -> str:
    most = worker.prefetch_count
    messages = "any number of messages" if most is None else f"up to {count(most, 'message')}"
    return (
        f"{cell(worker.name)} consumes {', '.join(worker.queues)} and holds {messages}, which "
        "return to their queue when it stops"
    )


def _adopt(cli: Cli, adoption: EtaAdoption, broker: BrokerQueues, has_unacked: bool) -> bool:
    """Adopt the messages of all queues; return whether Ctrl-C stopped it."""
    result, total = adoption.result, 0
    with moved_bar(cli, "adopted") as progress, stopping_between_steps() as check:
        bar = progress.add_task("", total=None, moved=0)

        def on_batch() -> None:
            progress.update(bar, total=total, completed=result.read, moved=result.adopted)
            check()

        try:
            for source in broker.sources(BATCH, has_unacked):
                total += source.count()
                adoption.adopt(source, on_batch)
        except KeyboardInterrupt:
            return True
    return False


def _document(run: _Run) -> dict[str, Any]:
    result = run.adoption.result
    return {
        "is_dry_run": run.is_dry_run,
        "state": "stopped" if run.is_stopped else "limit" if run.adoption.is_full else "done",
        "seconds": round(run.seconds, 3),
        "queues": list(run.queues),
        "adopted": result.adopted,
        "existing": result.existing,
        "taken": result.taken,
        "stay": {kind: result.stay[kind] for kind in _STAY},
        "reasons": result.reasons,
        "tasks": [
            {
                "task": name,
                "messages": found.count,
                "first_due": show_instant(found.first),
                "last_due": show_instant(found.last),
            }
            for name, found in sorted(result.tasks.items())
        ],
        "workers": [worker._asdict() for worker in run.workers],
    }


def _print(cli: Cli, run: _Run) -> None:
    result = run.adoption.result
    if result.tasks:
        print_table(
            ("task", "messages", "first due", "last due"),
            [
                [name, found.count, found.first, found.last]
                for name, found in sorted(result.tasks.items())
            ],
        )
    done = f"{'would adopt' if run.is_dry_run else 'adopted'} {count(result.adopted, 'message')}"
    say(f"{'stopped: ' if run.is_stopped else ''}{done} in {show_duration(run.seconds)}")
    if result.existing:
        have = "have" if run.is_dry_run else "had"
        say(f"{count(result.existing, 'message')} of an earlier call {have} a row")
    for kind, text in _STAY.items():
        if result.stay[kind]:
            say(f"{count(result.stay[kind], 'message')} {text}: stay in their queue")
    for reason in result.reasons:
        cli.note(cell(reason))
    if result.taken:
        cli.note(
            f"{count(result.taken, 'message')} went to a worker meanwhile, and may run twice: stop "
            "the workers before the next call"
        )
    for worker in run.workers:
        cli.note(_held(worker))
