"""A viewer sees at the top of a page which fault real workers have."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from delaytasks import NewTask
from delaytasks.console.viewers import Role
from delaytasks.runtime import runtime_of
from tests.running import Deployment
from tests.services import RedisServer, Services
from tests.ui.chromium import watched
from tests.ui.console_site import Site, served
from tests.ui.test_console_in_a_browser import MODES
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: Pixels that an operator sees without scrolling.
TALLEST = 850
PEAK = 240_000


class FaultyShop:
    """A database, a broker and workers, whose console is in this process."""

    def __init__(self, folder: Path, services: Services) -> None:
        self.broker = RedisServer(folder)
        self.deployment = Deployment(
            folder,
            services.url("postgresql"),
            self.broker.url,
            {"imports": ["tests.ui.shop_tasks"]},
            namespace="shop",
        )
        self.delays = self.deployment.delays
        self.site = Site(self.delays)
        self.deployment.beat()
        for number in range(150):
            delay = 0 if number < 30 else 15 * (number - 26)
            self.delays.schedule_delay("order.close", {"order": number}, delay)

    def wait_for(self, text: str, path: str = "/", deadline_s: float = 120) -> None:
        """Wait until a page of the console contains a text."""
        client = self.site.client(Role.OPERATE)
        wait_until(
            lambda: text in client.get(path).text, deadline_s, f"{path} to show {text!r}", every_s=1
        )

    def wait_for_tasks(self, number: int, **filters: Any) -> None:
        """Wait for this number of tasks, so that a page is not read while it changes."""
        found = self.delays.find
        wait_until(lambda: len(found(**filters)) == number, 60, f"{number} tasks with {filters}")

    def close(self) -> None:
        self.broker.stop()
        self.broker.start()  # the queues of the deployment are deleted there
        self.deployment.close()
        self.broker.stop()


# -- faults ---------------------------------------------------------------------------------------


def stop_the_broker(shop: FaultyShop) -> None:
    shop.deployment.worker()
    shop.broker.stop()
    shop.wait_for("The broker has not answered since")


def kill_a_worker(shop: FaultyShop) -> None:
    shop.deployment.worker()
    worker = shop.deployment.worker()
    for number in range(2):
        shop.delays.schedule_delay("report.build", {"report": number}, 0)
    shop.wait_for_tasks(2, status="RUNNING")
    worker.kill()
    shop.wait_for("was lost at")
    shop.wait_for("</span> On time.</h1>")  # the other worker has taken its tasks over


def let_a_tag_fail(shop: FaultyShop) -> None:
    shop.deployment.worker()
    for number in range(40):
        body = {"port": 440 + number % 4}
        shop.delays.schedule_delay("pay.notify", body, 0)
    shop.wait_for_tasks(40, tag="pay.notify", status="FAILED")
    shop.wait_for("40 tasks of pay.notify have failed")


def let_a_tag_be_retried(shop: FaultyShop) -> None:
    shop.deployment.worker()
    for number in range(50):
        body = {"port": 440 + number % 4}
        shop.delays.schedule_delay("pay.notify", body, 0, retries="1h 2h")
    shop.wait_for("50 runs of pay.notify have failed")  # the worker writes its counts once a minute


def reach_a_limit(shop: FaultyShop) -> None:
    shop.delays.set_policy(tag="report.build", concurrency=1, actor="maria")
    shop.deployment.worker()
    for number in range(60):
        shop.delays.schedule_delay("report.build", {"report": number}, 0)
    shop.wait_for_tasks(59, status="HELD")
    shop.wait_for("59 tasks of report.build wait")


def schedule_a_peak(shop: FaultyShop) -> None:
    for _ in range(2):
        shop.deployment.worker()
    for n in range(20):
        shop.delays.schedule_delay("newsletter.send", {"to": n}, 0)
    now = runtime_of(shop.delays).clock.now()
    nine = now.replace(hour=9, minute=0, second=0, microsecond=0)
    monday = nine + timedelta(days=-now.weekday() % 7)
    if monday <= now:
        monday += timedelta(days=7)
    shop.delays.schedule_many(
        NewTask("newsletter.send", {"to": number}, at=monday) for number in range(PEAK)
    )
    shop.wait_for('<span class="muted">measured</span>', "/forecast")
    shop.wait_for("On time, but a peak ahead will start late.")


class ShownPage(NamedTuple):
    """A page, and what it says at its top: the headline, and the sentences below it."""

    path: str
    headline: str
    sentence: str


class ShownFault(NamedTuple):
    """A fault, and the pages that show it, by their names."""

    cause: Callable[[FaultyShop], None]
    pages: dict[str, ShownPage]


def _on_overview(
    cause: Callable[[FaultyShop], None], picture: str, headline: str, sentence: str
) -> ShownFault:
    return ShownFault(cause, {picture: ShownPage("/", headline, sentence)})


FAULTS = {
    "broker": _on_overview(
        stop_the_broker,
        "fault-broker",
        # Between two sweeps, which find the tasks meanwhile, some are overdue.
        r"On time, but the broker does not answer\.|Late\. \d+ tasks are overdue, ",
        r"The broker has not answered since \d\d:\d\d UTC \(\d+s\); workers read the table",
    ),
    "worker": _on_overview(
        kill_a_worker,
        "fault-worker",
        r"On time\.",
        r"Worker w2@\w+ was lost at \d\d:\d\d UTC: it was killed, or its host is down\.",
    ),
    "tag": _on_overview(
        let_a_tag_fail,
        "fault-tag",
        r"On time, but 40 tasks failed\.",
        r"40 tasks of pay\.notify have failed since \d\d:\d\d UTC: .*timed out",
    ),
    "retries": _on_overview(
        let_a_tag_be_retried,
        "fault-retries",
        r"On time, but 50 runs have failed and will be retried\.",
        r"50 runs of pay\.notify have failed since \d\d:\d\d UTC, and will be retried: .*timed out",
    ),
    "limit": _on_overview(
        reach_a_limit,
        "fault-limit",
        r"On time, but 59 tasks wait for a limit\.",
        r"59 tasks of report\.build wait for its limit \(concurrency 1\), "
        r"the oldest since \d\d:\d\d UTC \(\d+s\)\.",
    ),
    "peak": ShownFault(
        schedule_a_peak,
        {
            "fault-peak-overview": ShownPage(
                "/",
                r"On time, but a peak ahead will start late\.",
                r"A peak is ahead\. From Mon \w+ \d+, 09:00 UTC: 2\d\d,\d{3} tasks.* of "
                r"newsletter\.send",
            ),
            "fault-peak": ShownPage(
                "/forecast",
                r"From Mon \w+ \d+, 09:00 UTC: 2\d\d,\d{3} tasks.* of newsletter\.send\)? keep "
                r"4 processes busy for \w+\. \d+ processes would run them within the hour\.",
                r"tasks until \w+ \w+ \d+",
            ),
        },
    ),
}


@contextmanager
def opened(services: Services) -> Iterator[FaultyShop]:
    with tempfile.TemporaryDirectory() as folder:
        shop = FaultyShop(Path(folder), services)
        try:
            yield shop
        finally:
            shop.close()


@pytest.mark.parametrize("name", FAULTS)
def test_the_top_of_the_page_names_the_fault(browser: Any, services: Services, name: str) -> None:
    fault = FAULTS[name]
    with opened(services) as shop, served(shop.site.app) as address:
        fault.cause(shop)
        shop.site.client(Role.OPERATE)
        with watched(browser, **MODES["light"]) as page:
            for shown in fault.pages.values():
                page.goto(address + shown.path)
                headline = page.locator("h1")
                assert re.search(shown.headline, headline.inner_text()), headline.inner_text()
                sentence = page.get_by_text(re.compile(shown.sentence)).first
                sentence.wait_for()
                box = sentence.bounding_box()
                assert box["y"] + box["height"] < TALLEST, "it is seen without scrolling"
