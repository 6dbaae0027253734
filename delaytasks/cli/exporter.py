"""`exporter`: serve the metrics of the databases to Prometheus."""

from __future__ import annotations

import logging
import signal
import threading

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import print_json, say
from delaytasks.core.errors import ConfigError
from delaytasks.metrics.files import NAMES, read_file
from delaytasks.runtime import runtime_of

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
