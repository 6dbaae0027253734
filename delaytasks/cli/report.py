"""`report`: one HTML file about the last hours, for colleagues."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import count
from delaytasks.cli.times import DURATION


@click.command(cls=Command)
@click.option(
    "--since", type=DURATION, default="1d", show_default=True, help="The time that it covers."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default="delaytasks-report.html",
    show_default=True,
    help="The file to write; - prints the page.",
)
@click.option("--title", default="delaytasks report", show_default=True, help="The heading.")
@pass_cli
def report(cli: Cli, since: timedelta, output: Path, title: str) -> None:
    """Write a report as one HTML file, which needs no server and loads nothing.

    It has a verdict, the runs by outcome, their lateness, failures grouped by their errors, the
    slowest tags, and what is due next. It has no bodies and no results.

    \b
    delaytasks report
    delaytasks report --since 7d -o week.html --title "Shop, week 48"
    """
    if since < timedelta(minutes=1):
        raise click.UsageError("--since is at least a minute.")
    from delaytasks.cli.reporting.data import gather
    from delaytasks.cli.reporting.findings import findings_of
    from delaytasks.cli.reporting.page import page_of

    data = gather(cli.delays, since)
    page = page_of(data, title)
    if str(output) == "-":
        click.echo(page, nl=False)
        return
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}.") from None
    findings = findings_of(data)
    found = count(len(findings.problems), "finding")
    document = {"file": str(output), **findings.as_json()}
    cli.answer(document, f"wrote {output}: {findings.headline} {found}")
