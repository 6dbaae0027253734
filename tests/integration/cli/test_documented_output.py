"""Commands print what docs/scale.md and docs/fix-a-problem.md show, apart from the times."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text

from delaytasks import NewTask
from tests.doc_pages import block_beginning
from tests.integration.cli.project import HOSTILE, Project
from tests.integration.cli.test_policies import hold


def shown(page: str, beginning: str) -> tuple[list[str], list[str]]:
    """Return the words of the documented command, and the lines that it prints."""
    command, *lines = block_beginning(page, beginning).text.splitlines()
    return command.split()[2:], [without_times(line) for line in lines]


def without_times(line: str) -> str:
    line = re.sub(r"\b[A-Z][a-z]{2} (?=\d{4}-)", "DAY ", line)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ( \(\w+\))?", "INSTANT", line).rstrip()


def printed(shop: Project, words: list[str]) -> list[str]:
    said = shop(*words)
    assert said.exit_code == 0, said.output
    own = said.stdout.replace(f"delaytasks -A {shop.name}", "delaytasks")
    return [without_times(line) for line in own.splitlines()]


@pytest.mark.slow
def test_the_forecast_of_a_peak(shop: Project) -> None:
    shop.patch.setenv("COLUMNS", "200")
    at = datetime.now(timezone.utc).replace(hour=9, minute=0) + timedelta(days=2)
    rows = """
        INSERT INTO yb_delay_task_message (tag, message_body, delay_time, expected_time)
        WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :n)
        SELECT 'newsletter.send', '{}', 0, :due FROM numbers
    """
    with shop.store.database.begin() as connection:
        due = f"{at:%Y-%m-%d %H:%M:00.000000}"
        connection.execute(text(rows), {"n": 240_000, "due": due})
    words, lines = shown("docs/scale.md", "$ delaytasks status --ahead 7d")
    assert printed(shop, words) == lines


def test_the_reason_why_a_task_has_not_run(shop: Project) -> None:
    words, lines = shown("docs/fix-a-problem.md", "$ delaytasks show")
    shop.store.workers.report("w", ["default"], "prefork", 2, 0)
    task = shop.schedule("mail.send", id=int(words[-1]))
    shop("pause", "--tag", "mail.send", "--actor", "ann@shop")
    hold(shop, task)
    assert printed(shop, words)[: len(lines) + 1] == [*lines, ""], "the fields follow"


# -- Test the command `forecast` ------------------------------------------------------------------


def test_an_empty_forecast_says_so(shop: Project) -> None:
    lines = shop("status", "--ahead", "7d").stdout.splitlines()
    assert lines[0].startswith("0 tasks become due until ")
    assert lines[1:] == ["Nothing becomes due."]
    document = shop.json("status", "--ahead", "7d")
    assert (document["due"], document["first_full"], document["hours"]) == (0, None, [])


def test_the_busiest_hour_is_shown_with_its_share_of_the_hour(shop: Project) -> None:
    at = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0) + timedelta(days=2)
    shop.delays.schedule_many(NewTask("mail", n, at=at) for n in range(1200))
    shop.store.workers.report("w", ["default", "letters"], "prefork", 2, 0)
    said = shop("status", "--ahead", "7d")
    busy = f"{at:%a %Y-%m-%dT%H:%M:%SZ}: 1,200 tasks of mail keep 2 processes busy for 30s.\n"
    assert f"The processes suffice. The busiest hour is {busy}" in said.stdout
    document = shop.json("status", "--ahead", "7d", "--processes", "1")
    *_, hour = document["hours"]
    assert (hour["due"], hour["start"], hour["busy_s"]) == (1200, at.isoformat(), 60.0)


def test_names_have_no_effect_on_the_terminal(shop: Project) -> None:
    shop.insert(tag=HOSTILE[:100], expected_time=datetime.now(timezone.utc), delay_time=0)
    said = shop("status", "--ahead", "7d")
    assert r"1 task of \x1b[31mred" in said.stdout
    assert r"without measurements: \x1b[31mred" in said.stderr
    assert not set("\x1b\x9b\u202e\r") & set(said.stdout + said.stderr)


def test_only_the_busiest_hours_are_printed(shop: Project) -> None:
    for hour in range(20):
        shop.schedule("mail", hour * 3600 + 1800)
    said = shop("status", "--ahead", "7d").stdout
    assert "and 8 hours more; --json has them" in said
    assert len(shop.json("status", "--ahead", "7d")["hours"]) == 20
