"""Run the demo: `./dev demo`, or `python -m examples.demo` in the project's folder.

The demo takes less than a minute and removes its files at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

SUCCESS = "[bold green]Nothing was lost, nothing ran early.[/]"
NEXT = """
What to read next:
  examples/demo/shop.py    the two processors of this shop
  examples/hello.py        the smallest one; start it with ./dev up
  README.md                how to use it in a project of your own
  docs/                    how it works, settings, operation
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev demo", description="A live demo of delayed tasks.")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also save the result as a picture"
    )
    picture: Path | None = parser.parse_args().svg
    console = Console(highlight=False)
    if os.name != "posix":
        console.print("The demo kills processes, and runs on Linux and macOS; on Windows use WSL.")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="delaytasks-demo-"))
    _use_nothing_but(folder)
    try:
        return _play(console, folder, picture)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _use_nothing_but(folder: Path) -> None:
    """Give the demo a database and a broker of its own, whatever the environment configures."""
    for name in [name for name in os.environ if name.startswith(("DELAYTASKS_", "CELERY_"))]:
        del os.environ[name]
    os.environ["CELERY_CONFIG_MODULE"] = "examples.demo.config"
    os.environ["DELAYTASKS_DATA_DIR"] = str(folder / "data")
    os.environ["DEMO_PARTNER"] = str(folder / "partner-answers")


def _play(console: Console, folder: Path, picture: Path | None) -> int:
    # These imports read the configuration, which `_use_nothing_but` has just set.
    from delaytasks import current_delays
    from delaytasks.db import migrations
    from delaytasks.runtime import runtime_of
    from examples.demo.display import Display, save_picture
    from examples.demo.figures import complaints, lateness_table, outcome_table
    from examples.demo.servers import Servers
    from examples.demo.story import Story

    delays: Any = current_delays()
    console.print("[bold]delaytasks[/]: starting a database, a broker, two workers and beat …")
    migrations.upgrade(runtime_of(delays).store.database)
    servers = Servers(folder)
    try:
        servers.start()
        console.print(
            f"  database  {runtime_of(delays).store.database.url}\n  broker    files", markup=False
        )
        with Display(console) as display:
            story = Story(servers.kill, folder / "partner-answers", display.tell)
            is_over = story.run(display.draw)
        shop = story.shop
        console.print(outcome_table(shop), lateness_table(shop))
        wrong = complaints(shop)
        if wrong or not is_over:
            console.print(
                f"[bold red]{len(wrong)} tasks did not end as expected:[/]", *wrong[:20], sep="\n"
            )
            for name in ("one", "two"):
                console.print(
                    f"--- log of worker {name}:", servers.log(name)[-3000:], sep="\n", markup=False
                )
            return 1
        console.print(SUCCESS)
        console.print(NEXT, markup=False)
        if picture is not None:
            tables = outcome_table(shop), lateness_table(shop)
            save_picture(picture, display.picture(), *tables, SUCCESS)
        return 0
    finally:
        servers.stop()
        delays.close()


if __name__ == "__main__":
    sys.exit(main())
