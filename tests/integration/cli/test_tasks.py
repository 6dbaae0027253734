"""The commands on tasks and policies: what they print, count, ask and refuse.

`tests/integration/test_faces.py` has the effect of each command.
"""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import UTC
from delaytasks.operate import task_calls as bulk
from tests.integration.cli.conftest import FAR, HOSTILE, Project
from tests.world.recording import set_columns


def test_schedule_and_show_print_a_task_with_all_of_its_fields(shop: Project) -> None:
    said = shop("schedule", "ok", '["é"]', *"--delay 30m --id 43 --key k".split()).stdout
    assert re.fullmatch(r"scheduled task 43 \(ok\): due \S+Z, in (30m|29m59s)\n", said)
    from_stdin = shop.json("schedule", "ok", "-", "--delay", "1h", typed='{"a": 1}')
    assert from_stdin["body"] == {"a": 1}
    shown = shop.json("show", "43")
    read = {name: shown[name] for name in ("update_time", "why")}
    assert {**shop.delays.get(43).as_json(), "failed_attempts": [], **read} == shown
    said = shop("show", "--tag", "ok", "--key", "k").stdout
    special = ("body", "error", "failed_attempts", "id", "status", "tag", "why")
    assert '  [\n    "é"\n  ]\n' in said
    assert all(re.search(rf"^{name} ", said, re.MULTILINE) for name in shown if name not in special)


def test_a_key_of_no_live_task_names_the_last_task_that_had_it(shop: Project) -> None:
    for delay in (3600, 60):
        shop.delays.cancel(newest := shop.schedule(key="k1", delay=delay))
    found = shop.json("show", "--tag", "ok", "--key", "k1")
    assert (found["id"], found["status"]) == (str(newest.id), "CANCELLED")
    error = shop.error("show", "--tag", "ok", "--key", "k2", exit_code=1)
    assert error["type"] == "TaskNotFoundError"


def test_list_takes_times_before_now_and_prints_the_cursor_of_the_next_page(shop: Project) -> None:
    ids = [str(shop.schedule("mail", 60 + number, key=f"a b{number}").id) for number in range(5)]
    near, old = shop.schedule("ok", 60), shop.overdue("ok")
    for due, tasks in (("1m..", [near]), ("..1m", [old]), ("3h..", [near, old])):
        found = shop.json("list", "--tag", "ok", "--due", due)["tasks"]
        assert [task["id"] for task in found] == [str(task.id) for task in tasks]
    seen, more = list[str](), list[str]()
    chosen = f"--tag mail --due 2020-01-01T00:00:00Z..{FAR} --created 1h.. --limit 2".split()
    for _ in range(3):
        said = shop("list", *chosen, *more)
        seen += [line.split()[0] for line in said.stdout.splitlines()[1:]]
        more = said.stderr.split()[-2:]
    assert (seen, more) == (ids[::-1], []), "the last page has no cursor"


#: The wrong argument, or the type of the error, and commands with this error.
WRONG = """
    due: list --due now.. | list --due ..3000000d
    due: cancel --tag ok --due 1h --yes | cancel --tag ok --due .. --yes
    cursor: list --cursor x
    UsageError: list --follow --oldest-first | cancel | cancel --yes | cancel --tag ok
    UsageError: cancel --key k | cancel --tag ok --running --yes | rerun | reschedule --delay 1
    UsageError: reschedule 1 --by 1h | reschedule --tag ok --by 1h --version 0 --yes
    body: schedule ok @body.json --delay 1
    NoSuchOption: schedule ok --delya 1
    delay: schedule ok | reschedule 1 2 --delay 1h --at 2030-01-01T00:00:00Z
    remove: limit --tag a --rate 1/s --remove
    recurring: pause --recurring a --tag b | resume --recurring a --queue b
    UsageError: status --probe --live | status --probe beat --name w | status --watch --ahead 1d
    UsageError: status --live
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
    wrong.append(("id", ["cancel", str(task.id), "x"]))
    for argument, command in wrong:
        assert shop.wrong(*command) == argument, f"{command}"[:100]
    assert [(each.id, each.version) for each in shop.delays.find()] == [(task.id, 0)]
    for listing in ("log", "limit", "recurring list"):
        assert shop.json(*listing.split()) == []


def test_each_named_task_is_moved_even_if_another_one_cannot_move(shop: Project) -> None:
    first, second, third = (shop.schedule(delay=60) for _ in range(3))
    shop.delays.cancel(second)
    ids = [str(first.id), "5", str(second.id)]
    answer = shop.json("cancel", *ids, exit_code=1)
    failed = {"id": "5", "error": "there is no task 5", "type": "TaskNotFoundError"}
    changed = {"cancelled": ids[:1], "requested": [], "unchanged": ids[2:]}
    assert answer == {**changed, "failed": [failed]}
    said = shop("reschedule", "5", str(third.id), "6", "--delay", "2h")
    assert said.stdout.startswith(f"rescheduled task {third.id} (ok): due ")
    errors = "Error: there is no task 5\nError: there is no task 6\n"
    assert (said.exit_code, said.stderr) == (1, errors)


# -- texts of other programs ----------------------------------------------------------------------


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
    task = shop.schedule("bad")
    shop("run")
    said = shop("show", str(task.id)).stdout
    assert "\nerror\n  Traceback (most recent call last):\n" in said
    assert r"  ValueError: \x1b[31mred\x1b[0m [red]markup[/red] \x9b1m \u202e \r" in said


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


# -- many tasks -----------------------------------------------------------------------------------


def test_ids_with_a_filter_or_a_shift_are_many_tasks_and_running_ones_are_left(
    shop: Project,
) -> None:
    first, second = (str(shop.schedule(delay=60 + n).id) for n in range(2))
    assert shop("cancel", first, second, "--dry-run").stdout == "2 tasks would be cancelled\n"
    assert shop.json("reschedule", first, second, "--jitter", "1m", "--yes")["changed"] == 2
    assert shop.json("cancel", first, "--tag", "mail", "--yes")["changed"] == 0
    id = str(shop.schedule().id)
    shop.store.claims("w", None).claim_due("default", [0], 1)
    left = shop("cancel", "--tag", "ok", "--dry-run").stderr
    assert left == "left as they are: 1 task (they run)\n"
    found = shop.json("cancel", first, id, "--tag", "ok", "--yes")
    assert (found["changed"], found["refused"]) == (1, 1)
    assert "runs, and is asked to stop" in shop("cancel", id, "--running").stdout


def test_log_lists_the_actor_the_action_and_the_progress(shop: Project) -> None:
    assert shop("log").stderr == "No operations yet.\n"
    shop.patch.setenv("LOGNAME", f"ann{HOSTILE}")
    shop.schedule(delay=60)
    shop("cancel", "--tag", "ok", "--yes")
    [entry] = shop.json("log")
    shown = [entry[name] for name in ("action", "state", "matched", "changed", "filter")]
    assert shown == ["cancel", "done", 1, 1, {"tag": "ok"}]
    said = shop("log").stdout
    assert all(line.isprintable() for line in said.splitlines()), said
    assert r"ann\x1b[31mred" in said


@pytest.mark.parametrize(("typed", "status"), [("n", Status.NOT_COMPLETE), ("y", Status.CANCELLED)])
def test_a_bulk_command_shows_the_count_and_asks(shop: Project, typed: str, status: Status) -> None:
    tasks = [shop.schedule(delay=60) for _ in range(3)]
    shop.is_at_terminal()
    said = shop("cancel", "--tag", "ok", typed=f"{typed}\n")
    assert "3 tasks would be cancelled. Go on? [y/N]" in said.stderr
    assert {shop.status(task) for task in tasks} == {status}
    wanted = (0, "cancelled 3 tasks\n") if typed == "y" else (1, "")
    assert (said.exit_code, said.stdout) == wanted


def test_a_stopped_shift_prints_how_to_go_on(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        shop.schedule(delay=3600 + n)
    ago = db_now_plus(-60)  # a shift leaves out tasks that have just moved
    set_columns(shop.store, "tasks", create_time=ago, update_time=ago)
    step: Any = bulk.BulkRun._step

    def stopped(run: Any, ids: Any) -> Any:
        if run.result.changed:
            raise KeyboardInterrupt
        return step(run, ids)

    monkeypatch.setattr(bulk, "BULK_ROWS", 2)
    monkeypatch.setattr(bulk.BulkRun, "_step", stopped)
    said = shop("reschedule", "--tag", "ok", "--by", "1h", "--yes")
    hint = "stopped: rescheduled 2 of 6 tasks; to go on run it again, with "
    assert (said.exit_code, said.stdout.startswith(hint)) == (1, True), said.stdout
    monkeypatch.undo()
    more = said.stdout.removeprefix(hint).split()
    assert shop.json("reschedule", "--tag", "ok", "--by", "1h", "--yes", *more)["changed"] == 4


# -- policies -------------------------------------------------------------------------------------


def test_pause_and_limit_print_the_policy_with_its_author_and_its_tasks(shop: Project) -> None:
    assert "nothing is limited" in shop("limit").stderr
    said = shop("pause", "--tag", "mail", "--actor", "[red]ann[/red]").stdout
    first, _, row = said.splitlines()
    assert first == "paused tag mail"
    assert re.fullmatch(r"tag +mail +yes +- +0 .* \[red\]ann\[/red\]", row), "as it was typed"
    shop.hold(shop.schedule("mail", 3600))
    said = shop("pause", "--tag", "mail", "--until", "2h").stdout
    assert re.search("^tag +mail +yes +- +1 ", said, re.MULTILINE), "the pause is not shortened"
    assert re.search("^- The tag mail is paused by .*, 1 held", shop("status").stdout, re.MULTILINE)
    assert shop("resume", "--tag", "mail").stdout == "resumed tag mail\n"
    shop("pause", "--queue", "letters", "--until", "2030-01-31T18:00:00Z")
    shop.insert(tag="mail", status=3, lease_until=db_now_plus(60), worker="w")
    said = shop("limit", "--tag", "mail", "--concurrency", "10", "--rate", "30/m").stdout
    assert re.search(r"^tag +mail +- +- +1 +1 +10 +- +30/m .*@", said, re.MULTILINE)
    said = shop("limit").stdout
    assert re.search(r"^queue +letters +yes +2030-01-31T18:00:00Z ", said, re.MULTILINE)
    assert [each["name"] for each in shop.json("limit", "--tag", "mail")] == ["mail"]
