"""Run the embedded database and broker for a Procfile: `python -m delaytasks.cli.embedded`.

If a database and a broker are configured, this process only waits, because a process supervisor
stops everything when one of its processes ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from delaytasks.celery import app, delays
from delaytasks.embedded.broker import FILES_NOTE, begin, broker_of
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations


def main() -> None:
    settings = delays.settings
    if not settings.database_url:
        migrations.upgrade(
            runtime_of(delays).store.database, settings.table_prefix, settings.table_schema or None
        )
        say(f"the database is {runtime_of(delays).store.database.url}")
    if app.conf.broker_url == broker_of(settings.data_dir).url:
        run_broker(settings.data_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    while True:
        time.sleep(3600)


def run_broker(data_dir: str) -> None:
    redis = begin(data_dir)
    if redis is None:
        say(FILES_NOTE)
        return
    say(f"the broker is {redis.server}, at {redis.socket}")
    os.set_inheritable(redis.lock, True)
    os.umask(0o077)  # its files contain messages
    os.execv(redis.server.program, redis.command)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
