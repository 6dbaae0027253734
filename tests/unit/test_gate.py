"""A child that is forked while a thread uses SQLite can use SQLite, too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from sqlalchemy import text

from delaytasks.storage.database import Database
from delaytasks.storage.engines import ForkGate
from tests.waiting import wait_until


def test_a_child_forked_while_a_thread_writes_is_not_locked_out(
    sqlite_path: Callable[[], str],
) -> None:
    database = Database(sqlite_path())
    database.autocommitted(lambda c: c.execute(text("CREATE TABLE t (n integer)")))
    writes, ends = threading.Event(), threading.Event()

    def write() -> None:
        with database.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (1)"))
            writes.set()
            ends.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    assert writes.wait(10)
    threading.Timer(0.3, ends.set).start()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # without the alarm, a blocked child would wait for 30 seconds
        database.autocommitted(lambda c: c.execute(text("INSERT INTO t VALUES (2)")))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert database.autocommitted(lambda c: c.execute(text("SELECT count(*) FROM t")).scalar()) == 2
    database.dispose()


def test_a_fork_waits_for_threads_in_the_gate_and_no_thread_enters_meanwhile() -> None:
    gate, order = ForkGate(), list[str]()
    gate.enter()
    forks = threading.Thread(target=lambda: (gate._before(), order.append("forked"), gate._after()))
    forks.start()
    wait_until(lambda: gate._is_forking, 5, "the fork to wait")
    enters = threading.Thread(target=lambda: (gate.enter(), order.append("entered")))
    enters.start()
    assert order == []
    gate.leave()
    forks.join(5)
    enters.join(5)
    assert order == ["forked", "entered"]
