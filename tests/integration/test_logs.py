"""Test the messages that a worker and beat log at INFO."""

from __future__ import annotations

import json

import pytest

from tests.doc_pages import block_beginning
from tests.integration.conftest import Deploy
from tests.proxy import Proxy, proxy_to
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
FORGED = "no \x1b[31m way\n[2026] forged"


def lines_with(log: str, words: str) -> list[str]:
    return [line for line in log.splitlines() if words in line]


def test_a_worker_logs_its_tags_each_failure_once_and_an_outage_in_two_lines(
    deploy: Deploy, proxies: list[Proxy]
) -> None:
    d = deploy()
    # Only the worker and beat reach the database through the proxy.
    proxies.append(proxy := proxy_to(d._database_url))
    d._database_url = proxy.url(d._database_url)
    worker, beat = d.worker(), d.beat()
    good, bad = d.schedule("test.quiet"), d.schedule("test.fail", body={"text": FORGED})
    worker.wait_for("task.failed")
    beat.wait_for("Starting")
    d.wait_for([good, d.schedule("test.quiet", 3)])  # beat has swept meanwhile
    log = worker.log()
    [tags] = lines_with(log, "tags have a processor here")
    assert "test.fail" in tags
    assert "mail" in tags.partition("queues: ")[2]
    assert not lines_with(log, str(good.id))
    assert len(lines_with(log, str(bad.id))) == 1
    assert log.count("Traceback (most recent call last)") == 1
    assert len(lines_with(log, "raise ValueError(")) == 1, "the processor's own line"
    assert "\x1b[31m way" not in log
    assert not [line for line in log.splitlines() if line.startswith("[2026] forged")]
    assert "Sending due task" not in beat.log()

    running = d.schedule("test.sleep", body={"seconds": 1})
    wait_until(d.runs, 10, "the sleeper to begin")
    before = len(worker.log())
    proxy.refuse()
    waiting = [d.schedule("test.quiet", delay=n / 4) for n in range(20)]
    worker.wait_for("store.down")
    wait_until(lambda: waiting[-1].expected_time < d.now(), 15, "all to be due")
    down = worker.log()[before:]
    proxy.heal()
    d.wait_for([running, *waiting], deadline_s=40)
    worker.wait_for("store.up")
    log = worker.log()[before:]
    assert (log.count("store.down"), log.count("store.up")) == (1, 1), log
    assert "Traceback" not in log
    assert len(down.splitlines()) <= 5, down


def test_each_line_of_a_worker_and_of_beat_is_structured(deploy: Deploy) -> None:
    d = deploy(log_format="json")
    worker, beat = d.worker(), d.beat()
    bad = d.schedule("test.fail", body={"text": FORGED}, key="k 1")
    worker.wait_for("task.failed")
    beat.wait_for("beat: Starting...")
    # The banner precedes the log.
    for log in (worker.log(), beat.log()):
        lines = lines_with(log, '{"time": ')
        after_the_first = log[log.index(lines[0]) :].splitlines()
        assert after_the_first == lines, "the traceback is in the line of its error"
    started, failed = map(json.loads, lines_with(worker.log(), str(bad.id)))
    assert (started["event"], failed["event"]) == ("task.started", "task.failed")
    assert (failed["key"], failed["attempt"]) == ("k 1", 1)
    assert failed["version"] > 0
    assert 0 <= failed["late_s"] < 15
    assert "raise ValueError(" in failed["traceback"]
    documented = block_beginning("docs/monitor.md", '{"time": ').text.splitlines()
    assert [[*json.loads(line)] for line in documented] == [[*started], [*failed]]
