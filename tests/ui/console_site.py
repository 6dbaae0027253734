"""A deployment with tasks in all states, its console, and viewers with each role."""

from __future__ import annotations

import html
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from celery import Celery
from flask import Flask
from flask.testing import FlaskClient

from delaytasks import DelayTasks, Retry
from delaytasks.cli.servers import Place, make_server
from delaytasks.console.application import make_console
from delaytasks.console.requests import EXTENSION, Role, Viewer
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.types import db_now_plus
from delaytasks.model.filters import LogEntry
from delaytasks.operate import statistics
from delaytasks.run.observers import RunCounts
from delaytasks.runtime import runtime_of
from delaytasks.settings import Address
from tests.world.recording import runner_of, set_columns

#: Text that other users may write into tags, keys, bodies and errors.
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">'\"{{7*7}}"
SECRET = "card 4111-secret"


def make_delays(url: str, is_new: bool = True, **settings: Any) -> DelayTasks:
    """Return a `DelayTasks` with a few processors, and with empty tables if `is_new` is true."""
    app = Celery("shop", broker="memory://")
    delays = DelayTasks(app, url, timer="direct", tags="any", **settings)

    @delays.processor("pay.notify")
    def notify(body: Any) -> None:
        place = f"host='pay.example', port={body['port']}"
        raise ConnectionError(f"HTTPSConnectionPool({place}): timed out")

    @delays.processor("report.build")
    def build(body: Any) -> None:
        raise ValueError(f"no template for order {body['order']}")

    @delays.processor("order.close", keep_result=True)
    def close(body: Any) -> Any:
        return {"closed": body["order"]}

    @delays.processor("stock.sync")
    def sync(body: Any) -> Any:
        return Retry(reason="the warehouse answers 503")

    @delays.processor("hostile")
    def hostile(body: Any) -> None:
        raise ValueError(HOSTILE)

    store = runtime_of(delays).store
    if is_new:
        create_sqlite_file(store.database.url)
        store.schema.metadata.drop_all(store.database.tx)
        store.schema.metadata.create_all(store.database.tx)
    return delays


def fill(delays: DelayTasks) -> None:
    """Add tasks in all states, workers, policies, schedules and sweeps."""
    for number in range(9):
        delays.schedule_delay("report.build", {"order": 900 + number}, 0, key=f"report-{number}")
    for number in range(4):
        body = {"port": 440 + number, "card": SECRET, "big": 2**60 + 1}
        delays.schedule_delay("pay.notify", body, 0, meta={"tenant": "acme"})
    for number in range(30):
        delays.schedule_delay("order.close", {"order": number}, 0, key=f"order-{number}")
    delays.schedule_delay("pay.notify", {"port": 8443}, 0, key="retrying", retries="5m 1h")
    delays.schedule_delay("hostile", {"text": HOSTILE}, 0, key=HOSTILE[:60])
    runner = runner_of(delays)
    while runner.run_due("default", range(10), limit=100).ran:
        pass  # on a slow machine, the budget of one chunk ends before all have run
    for number in range(160):
        delay = 40 + number * 9 + (number % 7) * 13 + (number // 40) * 60
        tag = "order.close" if number % 3 else "mail.send"
        delays.schedule_delay(tag, {"order": number}, delay, key=f"o{number}")
    for number in range(12):
        delays.schedule_delay("feed.read", {"feed": number}, 86400 * (number + 1), queue="feeds")
    delays.policies.pause(tag="mail.send", actor="maria")
    delays.policies.set(tag="pay.notify", concurrency=10, rate="100/s", actor="maria")
    delays.recurring.set("report-nightly", "report.build", {}, cron="0 2 * * *", tz="Europe/Berlin")
    delays.recurring.set("feeds", "feed.read", {"feed": 1}, every="5m", overlap="skip")
    delays.recurring.pause("feeds", actor="maria")
    nine_days = timedelta(days=9, hours=1)
    since = runtime_of(delays).clock.now().replace(microsecond=0) + nine_days
    delays.bulk.cancel(tag="feed.read", since=since, actor="maria")
    report_workers(delays)
    spread_failures(delays)
    for ago in range(60):
        runs = int(220 + 90 * math.sin(ago / 9)) - ago
        failed, retried = max(6 - ago // 3, 0), ago % 4
        write_runs(delays, "order.close", timedelta(minutes=ago), runs, failed, retried)


def report_workers(delays: DelayTasks, busy: int = 1) -> None:
    """Report two workers, and sweep, as they do."""
    workers, tags = runtime_of(delays).store.workers, ["order.close", "pay.notify"]
    for name, queues in (("celery@shop-1", ["default"]), ("celery@shop-2", ["default", "feeds"])):
        workers.report(name, queues, "prefork", 8, 1400, tags, busy=busy * len(queues))
    runtime_of(delays).sweeper.sweep(0)


def add_hostile(delays: DelayTasks) -> None:
    """Write hostile text wherever another program, a caller or a viewer can write a text."""

    @delays.processor(HOSTILE)
    def fail(body: Any) -> None:
        raise ValueError(HOSTILE)

    store, body = runtime_of(delays).store, {"text": HOSTILE}
    options: Any = {"meta": {"tenant": HOSTILE}, "limit_key": HOSTILE}
    delays.schedule_delay(HOSTILE, body, 0, key=HOSTILE, **options)
    delays.schedule_delay(HOSTILE, body, 0, key=f"{HOSTILE} again", retries="1h", **options)
    runner_of(delays).run_due("default", range(10), limit=10)
    delays.schedule_delay(HOSTILE, body, 600, key=f"{HOSTILE} waits", **options)
    delays.recurring.set(HOSTILE, HOSTILE, body, cron="0 2 * * *", actor=HOSTILE)
    delays.recurring.schedule_now(HOSTILE)
    delays.schedule_delay(HOSTILE, body, 3600, key="cancelled")
    delays.bulk.cancel(tag=HOSTILE, key_prefix="cancelled", actor=HOSTILE)
    delays.policies.pause(tag=HOSTILE, actor=HOSTILE)
    delays.policies.set(tag=HOSTILE, concurrency=1, actor=HOSTILE)
    for name in (HOSTILE, f"{HOSTILE} lost"):
        store.workers.report(name, ["default"], HOSTILE, 2, 0, [HOSTILE])
    set_columns(store, "tasks", {"tag": HOSTILE}, worker=HOSTILE)
    set_columns(store, "attempts", worker=HOSTILE)
    set_columns(store, "workers", {"name": HOSTILE}, version=HOSTILE)
    set_columns(store, "workers", {"name": f"{HOSTILE} lost"}, seen_at=db_now_plus(-600))
    set_columns(store, "recurring", {"name": HOSTILE}, tz=HOSTILE)
    store.workers.expire(delays.settings.silent_s)
    write_runs(delays, HOSTILE, timedelta(minutes=3), 7, 2)


def write_runs(
    delays: DelayTasks, tag: str, ago: timedelta, runs: int, failed: int = 0, retried: int = 0
) -> None:
    """Write what a worker would have counted in one minute of the past. One run of 60 is late."""
    counts, runtime = RunCounts(), runtime_of(delays)
    for number in range(runs):
        counts.add_run(0.9 if number % 60 == 59 else 0.02, 0.3)
    counts["done"] += runs - failed - retried
    counts["failed"] += failed
    counts["retried"] += retried
    with runtime.store.database.begin() as connection:
        at = runtime.clock.now() - ago
        statistics.write_counts(runtime.store, connection, {(tag, ""): counts}, at)


def spread_failures(delays: DelayTasks) -> None:
    """Let the failed tasks have failed one after the other, within some hours."""
    store = runtime_of(delays).store
    for number, task in enumerate(delays.find(status="FAILED", tag="report.build")):
        at = db_now_plus(-(number**2) * 900.0)
        set_columns(store, "tasks", {"id": task.id}, update_time=at)


class Site:
    """A console whose viewer the test chooses."""

    def __init__(self, delays: DelayTasks) -> None:
        self.delays = delays
        self.viewer: Viewer | None = Viewer("maria", Role.ADMIN)
        self.app: Flask = make_console(delays, lambda _: self.viewer, secret_key="of tests")
        self._begun: dict[str, tuple[int, threading.Thread]] = {}

    def client(self, role: Role | None = Role.ADMIN) -> FlaskClient:
        self.viewer = None if role is None else Viewer("maria", role)
        return self.app.test_client()

    def forget(self) -> None:
        """Let the next page read the database again."""
        self.app.extensions[EXTENSION].cache.forget()

    def begun_run(self, tag: str) -> str:
        """Return the path of a bulk run that has done a half, and goes on until it is stopped."""
        if tag not in self._begun:
            runtime, stop = runtime_of(self.delays), threading.Event()
            id, at, audit = runtime.new_id(), runtime.clock.now(), runtime.store.bulk.audit
            times, counts = (at, at, None), (5200, 2600, 12)
            audit.begin(LogEntry(id, "cancel", {"tag": tag}, "maria", "running", *times, *counts))

            def work() -> None:
                stop.wait()
                audit.end(id, "stopped", (2600, 12))

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self.app.extensions[EXTENSION].stops[id] = stop
            self._begun[tag] = id, thread
        return f"/audit/{self._begun[tag][0]}"

    def close(self) -> None:
        for stop in [*self.app.extensions[EXTENSION].stops.values()]:
            stop.set()
        for _, thread in self._begun.values():
            thread.join(10)
        self.delays.close()


@contextmanager
def healthy_site(url: str, **settings: Any) -> Iterator[Site]:
    """Yield a site with one worker, whose tables were just swept, and in which nothing is wrong."""
    site = Site(make_delays(url, **settings))
    runtime = runtime_of(site.delays)
    runtime.store.workers.report("celery@a", ["default"], "prefork", 1, 0)
    runtime.sweeper.sweep(0)
    yield site
    site.close()


def chart_titles(page: str, charts: int) -> str:
    """Return the texts of all bars of a page, a line each, after counting its charts."""
    found = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert len(found) == charts
    titles = re.findall(r"<title>([^<]*)", "".join(found))
    return "\n".join(html.unescape(title) for title in titles)


def token_of(client: FlaskClient, path: str = "/") -> str:
    """Return the CSRF token of a page's forms."""
    found = re.search(r'name="csrf" value="([^"]+)"', client.get(path).text)
    assert found is not None
    return found[1]


def post(client: FlaskClient, path: str, **fields: Any) -> Any:
    """Send a form as a browser does, and return the answer."""
    return client.post(path, data={"csrf": token_of(client), **fields})


@contextmanager
def served(app: Any, trusted_proxy: str | None = None) -> Iterator[str]:
    """Serve a WSGI application, and yield its address."""
    server = make_server(app, Place(Address("127.0.0.1", 0)), trusted_proxy)

    def run() -> None:
        with suppress(OSError):  # the socket that it waits for is closed below
            server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
        server.task_dispatcher.shutdown()
        thread.join(10)
