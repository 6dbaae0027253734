"""The clients of docs/callbacks.md in other languages, which call a real server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, blocks
from tests.integration.http_api.conftest import ApiCaller, ApiSite
from tests.running import output_of
from tests.ui.console_site import served

BLOCKS = [(block.language, block.text) for block in blocks(ROOT / "docs/callbacks.md")]
#: By the language of a block: the file for it, and the command that runs the file.
COMMANDS = {"text": ("schedule.sh", ["sh"]), "javascript": ("schedule.mjs", ["node"])}


@pytest.fixture
def url(site: ApiSite) -> Iterator[str]:
    with served(site.app) as url:
        yield url


def run(language: str, program: str, url: str, site: ApiSite, folder: Path) -> str:
    """Run the program of a block with a key of its own, and return its output."""
    name, command = COMMANDS[language]
    needed = "curl" if language == "text" else command[0]
    if shutil.which(needed) is None:
        pytest.skip(f"needs {needed}")
    (folder / name).write_text(program.replace("https://delays.example", url))
    key, _ = site.keys.create(f"shop-{len(site.keys.entries)}", ["schedule:order.*"])
    return output_of([*command, name], folder, {**os.environ, "API_KEY": key})


@pytest.mark.parametrize("language", COMMANDS)
def test_a_documented_client_schedules_a_task_which_the_documented_request_cancels(
    language: str, site: ApiSite, url: str, tmp_path: Path
) -> None:
    program = next(text for block, text in BLOCKS if block == language)
    output = run(language, program, url, site, tmp_path)
    [task] = site.delays.find(tag="order.close")
    assert (task.key, task.body) == ("7", {"order": 7})
    assert str(task.id) in output
    if language == "text":
        _, cancel, *_ = [text for block, text in BLOCKS if block == "text"]
        answer = run("text", cancel, url, site, tmp_path)
        assert '"is_cancelled":true' in answer.replace(" ", "")
        assert site.delays.get(task).status.name == "CANCELLED"


def test_a_key_that_is_in_use_is_answered_with_the_documented_problem(shop: ApiCaller) -> None:
    [documented] = [json.loads(text) for language, text in BLOCKS if language == "json"]
    body = {"tag": "order.close", "body": {"order": 7}, "delay": "30m", "key": "7"}
    task = shop.json("POST", "/v1/tasks", body)
    answer = shop("POST", "/v1/tasks", body)
    problem = answer.json
    assert problem is not None
    assert answer.status_code == problem["status"] == 409
    assert shop.json("POST", "/v1/tasks", {**body, "on_conflict": "keep"})["id"] == task["id"]
    assert problem.pop("id") == task["id"] != documented.pop("id")
    assert problem.pop("detail").startswith(f"task {task['id']} ")
    assert documented.pop("detail").startswith("task 7 ")
    assert problem == documented
