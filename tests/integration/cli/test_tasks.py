"""`schedule`, `list`, `show`, `cancel`, `reschedule` and `rerun` of tasks that are named."""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from delaytasks import Status
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import UTC
from tests.integration.cli.project import FAR, HOSTILE, Project
from tests.services import free_port
from tests.world.recording import set_columns


def test_schedule_answers_with_the_task(shop: Project) -> None:
    options = ["--key", "k", "--priority", "3", "--queue", "q", "--id", "42"]
    task = shop.json("schedule", "ok", '{"n": 9007199254740993}', "--delay", "1h30m", *options)
    wanted: dict[str, Any] = {"id": "42", "status": "NOT_COMPLETE", "tag": "ok", "key": "k"}
    wanted |= {"queue": "q", "priority": 3, "body": {"n": 9007199254740993}, "delay_s": 5400}
    assert task == task | wanted
    assert shop.json("schedule", "mail", "--delay", "1h")["queue"] == "letters"
    stored = shop.delays.get(42)
    assert stored.body == {"n": 9007199254740993}
    assert stored.expected_time.isoformat() == task["expected_time"]
    at = shop.json("schedule", "ok", "--at", "2030-01-01T02:00:00+02:00")
    assert at["expected_time"] == "2030-01-01T00:00:00+00:00"
    said = shop("schedule", "ok", "--delay", "30m", "--id", "43").stdout
    assert re.fullmatch(r"scheduled task 43 \(ok\): due \S+Z, in (30m|29m59s)\n", said)


def test_a_body_comes_from_a_file_or_from_stdin(shop: Project, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('["é"]', encoding="utf-8")
    assert shop.json("schedule", "ok", "@body.json", "--delay", "1h")["body"] == ["é"]
    assert shop.json("schedule", "ok", "-", "--delay", "1h", typed='{"a": 1}')["body"] == {"a": 1}
    assert shop.json("schedule", "ok", "--delay", "1h")["body"] is None


def test_a_key_in_use_is_refused_kept_or_replaced(shop: Project) -> None:
    first = shop.json("schedule", "ok", "1", "--delay", "1h", "--key", "k")
    again = ["schedule", "ok", "2", "--delay", "2h", "--key", "k"]
    assert shop.error(*again, exit_code=1)["type"] == "DuplicateTaskError"
    kept = shop.json(*again, "--on-conflict", "keep")
    assert (kept["id"], kept["body"]) == (first["id"], 1)
    replaced = shop.json(*again, "--on-conflict", "replace")
    assert (replaced["id"], replaced["body"]) == (first["id"], 2)


def test_an_unavailable_broker_is_reported_and_does_no_harm(shop: Project) -> None:
    shop.patch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    said = shop("schedule", "ok", "--delay", "1")
    assert said.exit_code == 0
    assert "a sweep will send it" in said.stderr
    assert len(shop.delays.find()) == 1


def ids(shop: Project, *options: str) -> list[str]:
    return [found["id"] for found in shop.json("list", *options)["tasks"]]


def test_list_finds_by_tag_status_key_and_time(shop: Project) -> None:
    task = shop.schedule("mail", 3600, key="k")
    near, old = shop.schedule("ok", 60), shop.schedule("ok")
    set_columns(shop.store, "tasks", {"id": old.id}, expected_time=db_now_plus(-7200))
    shop.delays.cancel(shop.schedule("mail", 7200))
    end = (task.expected_time + timedelta(seconds=1)).isoformat()
    assert len(ids(shop)) == 4
    for chosen in ("--status not_complete", "--key k", "--key k*"):
        assert ids(shop, "--tag", "mail", *chosen.split()) == [str(task.id)]
    assert ids(shop, "--due", f"{task.expected_time.isoformat()}..{end}") == [str(task.id)]
    # A duration counts back from now.
    for due, found in (("1h..", [near]), ("..1h", [old]), ("3h..", [near, old])):
        assert ids(shop, "--tag", "ok", "--due", due) == [str(one.id) for one in found]
    assert shop.json("cancel", "--due", "..1h", "--yes")["changed"] == 1


def test_list_prints_the_cursor_of_the_next_page(shop: Project) -> None:
    ids = [str(shop.schedule("mail", 60 + number, key=f"a b{number}").id) for number in range(5)]
    seen: list[str] = []
    chosen = f"--tag mail --status NOT_COMPLETE --due 2020-01-01T00:00:00Z..{FAR} --created 1h.."
    more: list[str] = []
    for _ in range(3):
        said = shop("list", *chosen.split(), "--limit", "2", *more)
        seen += [line.split()[0] for line in said.stdout.splitlines()[1:]]
        more = said.stderr.split()[-2:]
    assert more == [], "the last page has no cursor"
    assert seen == ids[::-1]
    assert shop.json("list", "--limit", "3")["cursor"]


#: The wrong argument, or the type of the error, and commands with this error.
WRONG = """
    limit: list --limit 0 | log --limit 0
    cursor: list --cursor x
    due: list --due now.. | list --due ..3000000d
    due: cancel --tag ok --due 1h --yes | cancel --tag ok --due .. --yes
    UsageError: list --follow --oldest-first
    UsageError: cancel | cancel --yes | cancel --tag ok | cancel --key k
    UsageError: cancel --tag ok --running --yes
    id: cancel x | schedule ok --delay 1 --id '1 OR 1=1'
    status: cancel --tag ok --status DONE --yes | rerun --status RUNNING --yes
    key_prefix: cancel --tag ok --key * --yes
    UsageError: reschedule --delay 1 | reschedule 1 --by 1h
    delay: reschedule 1 | reschedule 1 2 --delay 1h --at 2030-01-01T00:00:00Z
    delay: reschedule --tag ok --yes | reschedule --tag ok --by 1h --delay 1h --yes
    UsageError: reschedule --tag ok --by 1h --version 0 --yes
    UsageError: rerun
    entry: rerun --entry 7 --yes
    delay: schedule ok --delay soon
    body: schedule ok {a} --delay 1
    BadParameter: schedule ok @nowhere.json --delay 1
    MissingParameter: schedule
    delay: schedule ok | schedule ok --delay 1 --at 2999-01-01T00:00:00Z
    NoSuchOption: schedule ok --delya 1
    tag: pause | resume --tag a --queue b
    queue: limit --queue 'a b' --remove
    queue: limit --queue a --rate 1/s
    tag: limit --rate 1/s
    remove: limit --tag a --rate 1/s --remove
    recurring: pause --recurring a --tag b | pause --recurring a --until 1h
    recurring: resume --recurring a --queue b
    until: pause --tag mail --until soon | pause --tag mail --until 2020-01-31T18:00:00Z
    rate: limit --tag mail --rate fast
    cron: recurring set r ok --cron '61 * * * *'
    body: recurring set r ok { --every 5m
    UsageError: recurring list --next 3 | recurring list r* --next 3
    UsageError: status --probe worker --live --max-overdue 0
    UsageError: status --probe --live | status --probe beat --name w | status --watch --ahead 1d
    UsageError: status --live | status --probe worker --processes 2
    days: status --ahead 0
"""


def test_a_wrong_command_exits_with_2_and_changes_nothing(shop: Project) -> None:
    task = shop.schedule(delay=60, key="k")
    wrong = [
        (argument, shlex.split(command))
        for argument, commands in re.findall(r"(\w+): (.*)", WRONG)
        for command in commands.split(" | ")
    ]
    for body in ("[" * 100_000, json.dumps("x" * 300_000)):
        wrong.append(("body", ["schedule", "ok", body, "--delay", "1"]))
    wrong.append(("tag", ["schedule", "a\nb", "--delay", "1"]))
    wrong.append(("actor", ["pause", "--tag", "mail", "--actor", HOSTILE]))
    for argument, command in wrong:
        assert shop.wrong(*command) == argument, f"{command}"[:100]
    assert [(each.id, each.version) for each in shop.delays.find()] == [(task.id, 0)]
    for listing in ("log", "limit", "recurring list"):
        assert shop.json(*listing.split()) == []


def test_show_has_all_fields_and_the_allowed_moves(shop: Project) -> None:
    task = shop.schedule("ok", 3600, {"a": [1]}, key="k")
    shown = shop.json("show", str(task.id))
    read = {name: shown[name] for name in ("moves", "update_time", "why")}
    assert {**task.as_json(), "failed_attempts": [], **read} == shown
    assert shown["moves"] == ["claim", "hold", "cancel", "reschedule", "replace"]
    said = shop("show", "--tag", "ok", "--key", "k").stdout
    special = ("body", "error", "failed_attempts", "id", "status", "tag", "why")
    assert '  {\n    "a": [\n      1\n    ]\n  }\n' in said
    assert all(re.search(rf"^{name} ", said, re.MULTILINE) for name in shown if name not in special)


def test_untrusted_text_in_rows_is_escaped(shop: Project) -> None:
    """The commands escape each kind of text in a foreign row that could harm a terminal."""
    hostile = dict.fromkeys(("tag", "error_stack", "task_key", "worker"), HOSTILE)
    shop.insert(id=7, status=2, message_body=f"not json {HOSTILE}", **hostile)
    for command in ("list", "show 7", "reschedule 7 --delay 1", "rerun 7", "status"):
        said = shop(*command.split()).output
        assert all(line.isprintable() for line in said.split("\n")), said
        assert not re.search(r"^forged line", said, re.MULTILINE)
    assert len(shop("list").stdout.splitlines()) == 2
    assert "[red]markup[/red]" in shop("list").stdout
    shown = shop("show", "7", "--json").stdout
    assert shown.replace("\n", "").isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)["tag"] == HOSTILE


def test_an_error_s_stack_is_shown_line_by_line(shop: Project) -> None:
    task = shop.schedule("bad")
    shop("run")
    said = shop("show", str(task.id)).stdout
    assert "\nerror\n  Traceback (most recent call last):\n" in said
    assert r"  ValueError: \x1b[31mred\x1b[0m [red]markup[/red] \x9b1m \u202e \r" in said


def test_cancel_answers_for_each_task(shop: Project) -> None:
    first, second = shop.schedule(delay=60, key="k"), shop.schedule(delay=60)
    shop.delays.cancel(second)
    error = shop.error("cancel", str(first.id), "x", exit_code=2)
    assert error["argument"] == "id"
    assert shop.status(first) is Status.NOT_COMPLETE, "an invalid id stops the whole command"
    answer = shop.json("cancel", str(first.id), "5", str(second.id), exit_code=1)
    failed = {"id": "5", "error": "there is no task 5", "type": "TaskNotFoundError"}
    changed = {"cancelled": [str(first.id)], "requested": [], "unchanged": [str(second.id)]}
    assert answer == {**changed, "failed": [failed]}
    assert shop.json("cancel", "--tag", "ok", "--key", "k")["unchanged"] == [str(first.id)]
    error = shop.error("cancel", "--tag", "ok", "--key", "other", exit_code=1)
    assert error["type"] == "TaskNotFoundError"
    third = shop.schedule(delay=60)
    said = shop("cancel", "5", str(third.id), "6")
    errors = "Error: there is no task 5\nError: there is no task 6\n"
    assert (said.exit_code, said.stdout, said.stderr) == (1, f"cancelled task {third.id}\n", errors)


def test_reschedule_moves_each_task_unless_its_version_changed(shop: Project) -> None:
    task, other = shop.schedule(delay=60, key="k"), str(shop.schedule(delay=60).id)
    named = ("reschedule", "--tag", "ok", "--key", "k")
    [moved] = shop.json(*named, "--at", "2030-01-01T00:00:00Z", "--version", "0")["rescheduled"]
    assert (moved["expected_time"], moved["version"]) == ("2030-01-01T00:00:00+00:00", 1)
    answer = shop.json("reschedule", other, "5", "--delay", "2h", exit_code=1)
    assert [one["id"] for one in answer["rescheduled"] + answer["failed"]] == [other, "5"]
    stale = shop.error(*named, "--delay", "2h", "--version", "0", exit_code=1)
    assert stale["type"] == "StaleVersionError"
    assert "rescheduled task" in shop("reschedule", str(task.id), "--delay", "2h").stdout


def test_retry_runs_failed_and_cancelled_tasks_again(shop: Project) -> None:
    failed, cancelled, waiting = shop.schedule("bad"), *(shop.schedule(delay=60) for _ in range(2))
    shop("run")
    shop.delays.cancel(cancelled)
    ids = [str(task.id) for task in (failed, cancelled, waiting)]
    answer = shop.json("rerun", *ids, "--delay", "1h", exit_code=1)
    moved = [(task["id"], task["status"]) for task in answer["rerun"]]
    assert moved == [(id, "NOT_COMPLETE") for id in ids[:2]]
    assert [(one["id"], one["type"]) for one in answer["failed"]] == [(ids[2], "TaskStateError")]
    in_59_minutes = shop.store.tasks.now() + timedelta(minutes=59)
    assert shop.delays.get(failed.id).expected_time > in_59_minutes


NONSENSE: dict[str, list[Any]] = {
    "message_body": ['{"a": NaN}', "[1e400]", "[" * 900 + "]" * 900, "9" * 5000, '"\\ud800"'],
    "headers": ['{"retry": NaN}', "[]"],
    "result": ["{", "Infinity"],
    "delay_time": [-(2**63)],
    "ip_address": [-1],
    "expected_time": [datetime(9999, 12, 30, tzinfo=UTC), datetime(1, 1, 2, tzinfo=UTC)],
    "task_key": ["\x1b[31m\r\n"],
    "limit_key": ["\u202e"],
}


def test_commands_handle_rows_with_invalid_values(shop: Project) -> None:
    rows = [{name: value} for name, values in NONSENSE.items() for value in values]
    for id, nonsense in enumerate(rows, 1):
        shop.insert(id=id, status=4, **nonsense)
    shown = [f"show {id}" for id in range(1, len(rows) + 1)]
    for command in ("list", "status", "check", *shown, "cancel 3", "rerun 4", "run"):
        for words in (command.split(), [*command.split(), "--json"]):
            said = shop(*words)
            assert said.exit_code in (0, 1), (words, said.output)
            assert all(line.isprintable() for line in said.output.split("\n"))
