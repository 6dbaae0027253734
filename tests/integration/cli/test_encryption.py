"""Test `encryption key`, `encryption status` and `encryption rotate`."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import text, update

from delaytasks.core.encryption import key_name, new_key
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.encryption import key_rotation as rotation
from delaytasks.encryption.key_rotation import Rotation
from delaytasks.wiring import rewire, wiring_of
from tests.integration.cli.project import Project

OLD, NEW = new_key(), new_key()
VARIABLE = "DELAYTASKS_ENCRYPTION_KEYS"


def reopen(project: Project, monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Make the next command read the keys again, like a new process."""
    monkeypatch.setenv(VARIABLE, " ".join(keys))
    rewire(project.delays)


def test_each_new_key_is_different_and_is_accepted(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shop.json("encryption", "key")
    assert made["name"] == key_name(made["key"])
    plain = shop("encryption", "key").stdout.strip()
    assert plain != made["key"]
    reopen(shop, monkeypatch, plain, made["key"])
    assert shop.json("config")["settings"]
    assert plain not in shop("config").stdout


def test_bodies_are_rotated_from_plain_to_a_key_and_to_the_next_key(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [shop.schedule("ok", 60, {"n": n}) for n in range(3)]
    shop.delays.cancel(tasks[0])
    refused = shop.error("encryption", "rotate", exit_code=2)
    assert "delaytasks_encryption_keys is empty" in refused["error"]
    assert shop.json("encryption", "status")["keys"] == [
        {"key": "plain", "is": "first", "live": 2, "finished": None}
    ]

    reopen(shop, monkeypatch, OLD)
    said = shop("encryption", "rotate", "--all")
    assert (said.exit_code, said.stdout.splitlines()[0]) == (0, "encrypted 3 tasks")
    reopen(shop, monkeypatch, NEW, OLD)
    found = shop.json("encryption", "rotate")
    assert (found["changed"], found["unreadable"], found["state"], found["missing"]) == (
        2,
        0,
        "done",
        [],
    )
    of_new = {"key": key_name(NEW), "is": "first", "live": 2, "finished": 0}
    of_old = {"key": key_name(OLD), "is": "reads", "live": 0, "finished": 1}
    assert shop.json("encryption", "status", "--all")["keys"] == [of_new, of_old]

    reopen(shop, monkeypatch, NEW)
    missing = shop.json("encryption", "status", "--all", exit_code=1)["keys"]
    assert missing == [of_new, {**of_old, "is": "missing"}]
    shown = shop.json("show", str(tasks[0].id))
    assert shown["body"] == f"(encrypted with key {key_name(OLD)}, which can not read it here)"
    assert shown["body"] in shop("show", str(tasks[0].id)).stdout
    assert shop.json("show", str(tasks[1].id))["body"] == {"n": 1}

    reopen(shop, monkeypatch, "plain", NEW, OLD)
    assert shop("encryption", "rotate", "--all").stdout.startswith("decrypted 3 tasks\n")
    assert shop.json("encryption", "status", "--all")["keys"][0] == {
        "key": "plain",
        "is": "first",
        "live": 2,
        "finished": 1,
    }


def test_texts_that_are_not_bound_to_their_task_are_counted_and_bound(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(2):
        shop.schedule("ok", 60, n)
    change_all(shop, f"fernet:{key_name(OLD)}:{Fernet(OLD).encrypt(b'7').decode()}")
    reopen(shop, monkeypatch, OLD)
    first = {"key": key_name(OLD), "is": "first", "live": 0, "finished": None}
    unbound = {"key": f"fernet:{key_name(OLD)}", "is": "old form", "live": 2, "finished": None}
    assert shop.json("encryption", "status")["keys"] == [first, unbound]
    assert shop.json("encryption", "rotate")["changed"] == 2
    assert shop.json("encryption", "status")["keys"] == [{**first, "live": 2}]
    change_all(shop, f"fernet:{key_name(NEW)}:{Fernet(NEW).encrypt(b'7').decode()}")
    missing = shop.json("encryption", "status", exit_code=1)["keys"]
    assert missing[1] == {**unbound, "key": f"fernet:{key_name(NEW)}", "is": "missing"}


def change_all(project: Project, body: str) -> None:
    with wiring_of(project.delays).store.database.begin() as connection:
        connection.execute(
            update(wiring_of(project.delays).store.schema.tasks).values(message_body=body)
        )


def test_unreadable_bodies_are_counted(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.schedule("ok", 60)
    change_all(shop, "fernet:0123abcd:gAAAAA")
    reopen(shop, monkeypatch, NEW)
    said = shop("encryption", "rotate")
    assert (said.exit_code, said.stdout.splitlines()[0]) == (1, "encrypted 0 tasks")
    assert "0123abcd  missing" in said.stdout
    reopen(shop, monkeypatch, "plain", NEW)
    said = shop("encryption", "rotate")
    assert (said.exit_code, said.stderr) == (
        1,
        "left as they are: 1 task (no key here reads them)\n",
    )
    assert shop("check").exit_code == 1
    assert "0123abcd" in shop("check").stdout
    # The key of this damaged body is configured.
    change_all(shop, f"fernet:{key_name(NEW)}:gAAAAA")
    said = shop("encryption", "rotate")
    assert (said.exit_code, said.stderr) == (
        1,
        "left as they are: 1 task (no key here reads them)\n",
    )


def test_after_ctrl_c_rotate_ends_after_its_step_and_the_next_call_continues(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [shop.schedule("ok", 60, n) for n in range(5)]
    reopen(shop, monkeypatch, NEW)
    monkeypatch.setattr(rotation, "ROTATED_ROWS", 2)
    step = Rotation._step

    def interrupted(self: Rotation, *rest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Rotation, "_step", interrupted)
        said = shop("encryption", "rotate")
    assert (said.exit_code, said.stdout) == (1, "stopped: encrypted 2 tasks\n")
    assert shop.json("encryption", "rotate")["changed"] == 3
    assert [shop.delays.get(task).body for task in tasks] == list(range(5))


def stored(project: Project) -> list[str]:
    found: list[str] = []
    for shard in wiring_of(project.delays).shards:
        with shard.store.database.begin() as connection:
            query = text(f"SELECT message_body FROM {shard.store.schema.tasks.name}")
            found += (row[0] for row in connection.execute(query))
    return found


def test_all_databases_are_rotated_even_if_one_of_them_is_down(
    two: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, shard in enumerate(wiring_of(two.delays).shards):
        for _ in range(number + 1):
            two.schedule("ok", 60, "cAnArY", id=shard.new_id())
    reopen(two, monkeypatch, NEW)

    def is_down(*_: object) -> NoReturn:
        raise StoreUnavailableError("down")

    with monkeypatch.context() as patched:
        patched.setattr(wiring_of(two.delays).shards[0].store.bulk, "having", is_down)
        found = two.json("encryption", "rotate", exit_code=1)
        assert (found["changed"], found["missing"], found["keys"][0]["live"]) == (2, [0], 2)
        assert "shard 0 cannot be reached" in two("encryption", "status").stderr
    assert two.json("encryption", "rotate")["changed"] == 1
    assert [task.body for task in two.delays.find()] == ["cAnArY"] * 3
    assert len(stored(two)) == 3
    assert "cAnArY" not in repr(stored(two))


@pytest.mark.parametrize(
    "keys", ["not-a-key", "plain", f"{NEW} {NEW}"], ids=["no key", "plain alone", "one twice"]
)
def test_a_wrong_key_ends_each_command_with_2_and_is_not_shown(
    shop: Project, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setenv(VARIABLE, keys)
    rewire(shop.delays)
    for words in (["check"], ["encryption", "status"], ["config"]):
        said = shop.error(*words, exit_code=2)["error"]
        assert "delaytasks_encryption_keys = *** (from environment)" in said
        assert "not-a-key" not in said
        assert NEW not in said
