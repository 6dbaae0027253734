"""`tail` prints the changes of tasks as they happen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable

from delaytasks.core.interfaces import Entry
from tests.integration.cli.project import Project


def during(work: Callable[[], object], shop: Project, *options: str) -> str:
    """Return what `tail` prints while another thread works."""
    thread = threading.Timer(0.3, work)
    thread.start()
    result = shop("tail", "--for", "1500ms", "--every", "100ms", *options)
    thread.join()
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tail_prints_a_line_for_each_change(shop: Project) -> None:
    task = shop.schedule("bad", key="k1")
    lines = during(lambda: shop.delays.runner().run([Entry(task.id, 0, 0)]), shop).splitlines()
    at = r"[0-9:]{8}\.[0-9]{3}"
    assert re.fullmatch(rf"{at} NOT_COMPLETE bad +{task.id} k1  due now", lines[0])
    assert re.match(
        rf"{at} FAILED       bad +{task.id} k1  \S+ late, took \S+, ValueError: ", lines[-1]
    )
    assert not [line for line in lines if line.startswith("forged")]


def test_tail_on_a_terminal_colors_the_status_and_no_text_of_a_task(shop: Project) -> None:
    tasks = {name: shop.schedule(name) for name in ("ok", "bad")}
    shop.delays.runner().run([Entry(task.id, 0, 0) for task in tasks.values()])
    shop.delays.cancel(shop.schedule("mail", 60))
    shop.schedule("mail", 60)
    lines = shop("tail", "--for", "0", color=True).stdout.splitlines()
    styled = [re.sub(r"\d\d:.{9}|\d{6,}.*", "", line) for line in lines]
    dim, bold, end = "\x1b[2m", "\x1b[1m", "\x1b[0m"
    assert sorted(styled) == sorted(
        f"{dim}{end} {color}{status:12}{end} {bold}{tag:16}{end} "
        for color, status, tag in [
            ("\x1b[32m", "DONE", "ok"),
            ("\x1b[31m", "FAILED", "bad"),
            ("\x1b[90m", "CANCELLED", "mail"),
            ("", "NOT_COMPLETE", "mail"),
        ]
    )
    assert all(line.count("\x1b") == styled[at].count("\x1b") for at, line in enumerate(lines))
    assert shop("tail", "--for", "0").stdout.count("\x1b") == 0


def test_tail_in_json_has_a_document_in_each_line(shop: Project) -> None:
    def work() -> None:
        shop.schedule("ok", body={"secret": 1}, meta={"tenant": "acme"})
        shop.schedule("ok", meta={"tenant": "other"})

    lines = during(work, shop, "--json", "--meta", "tenant=acme").splitlines()
    [document] = [json.loads(line) for line in lines]
    assert (document["tag"], document["status"]) == ("ok", "NOT_COMPLETE")
    assert document["meta"] == {"tenant": "acme"}
    assert "secret" not in lines[0]
    assert "body" not in document


def test_tail_begins_with_the_last_changes_that_are_asked_for(shop: Project) -> None:
    tasks = [shop.schedule() for _ in range(5)]
    assert len(shop("tail", "--for", "0", "--lines", "3").stdout.splitlines()) == 3
    assert shop("tail", "--for", "0", "--lines", "0").stdout == ""
    assert str(tasks[-1].id) in shop("tail", "--for", "0").stdout


def test_tail_without_tables_is_an_error(bare: Project) -> None:
    assert "db upgrade" in bare.error("tail", "--for", "0", exit_code=1)["error"]
