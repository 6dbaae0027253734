"""Real workers and beats for tests: separate processes with private tables, queues and clocks."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import requests
from celery import Celery
from redis import Redis
from sqlalchemy import insert, select

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.db.types import db_now_plus
from delaytasks.runtime import runtime_of
from tests.proxy import Proxy
from tests.services import free_port, spawn
from tests.waiting import STACKS, wait_until
from tests.world import Entry
from tests.world.recording import counted, make_tables

ROOT = Path(__file__).parent.parent
#: Short intervals, so that tests of slow paths take seconds.
QUICK: dict[str, Any] = {"sweep": 1, "_self_sweep_s": 2, "_grace_s": 0.5, "horizon": 10, "lease": 4}
#: As in the bounds of docs/guarantees.md.
DISPATCH_S = 2
#: The first log line of `delaytasks run --forever`.
STARTED = "Runs tasks as they fall due"
#: The fixture of each broker's URL, and its Celery configuration.
BROKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "redis": ("redis_url", {}),
    "rabbitmq": ("rabbitmq_url", {}),
    "rabbitmq-quorum": ("rabbitmq_url", {"task_default_queue_type": "quorum"}),
}


def output_of(command: Sequence[Any], folder: Path = ROOT, env: Any = None) -> str:
    """Run a program to its end, which is a success, and return what it prints."""
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def clean_environment(**own: str) -> dict[str, str]:
    """Return the environment without settings of projects and tests, and with `own` variables."""
    theirs = ("DELAYTASKS_", "CELERY_", "DJANGO_", "PYTEST_", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if not k.startswith(theirs)} | own


def quick(*values: Any) -> Any:
    """Return a parameter of a slow test, with which it belongs to the quick suite."""
    return pytest.param(*values, marks=pytest.mark.quick)


def combinations(names: str, is_quick: bool = False) -> list[Any]:
    """Return parameters of a test: a database, a broker and a pool for each id in `names`.

    If `is_quick` is true, the tests belong to the quick suite, although their module is slow.
    """
    marks = [pytest.mark.quick] if is_quick else []
    return [pytest.param(*id.split("-"), id=id, marks=marks) for id in names.split()]


class Deployment:
    """One or several databases, a broker, and the processes that a test starts with them."""

    def __init__(
        self, folder: Path, database_url: str, broker_url: str, conf: Any = None, **settings: Any
    ) -> None:
        self.folder = folder
        self.file = folder / "runs.txt"
        self.file.touch()
        name: str = settings.get("namespace", "t" + secrets.token_hex(4))
        self.settings = {**QUICK, "namespace": name, "table_prefix": name + "_", **settings}
        self.conf = {"broker_url": broker_url, "broker_connection_retry_on_startup": True}
        self.conf |= {**(conf or {}), "task_default_queue": f"{name}.celery"}
        #: The proxies to the database and the broker, if the test asked for them.
        self.proxies: dict[str, Proxy] = {}
        self._database_url = database_url
        self.delays = self.producer()
        self.store = make_tables(self.delays)
        self._processes: list[Process] = []

    def producer(self, database_url: str | None = None) -> DelayTasks:
        """Return a producer with the current settings, optionally with another database URL."""
        app = Celery("producer", set_as_current=False)
        app.conf.update(self.conf)
        return DelayTasks(app, database_url or self._database_url, **self.settings)

    def worker(self, *args: str, concurrency: int = 2, ready_s: float = 30, **more: str) -> Process:
        """Start a worker. `more` is its pool, and what is added to its environment."""
        process = self.begin_worker(*args, concurrency=concurrency, **more)
        process.wait_for(" ready.", ready_s)
        return process

    def begin_worker(
        self, *options: str, pool: str = "prefork", concurrency: int = 2, **more: str
    ) -> Process:
        """Start a worker. It is ready when its log contains that."""
        name = self.node(len(self._processes))
        command = ["worker", "-P", pool, "-c", str(concurrency), "-n", name, "-l", "INFO"]
        quiet = ("--without-gossip", "--without-mingle")
        return self._start(name, *command, *quiet, *options, **more)

    def drainer(self, *options: str, concurrency: int = 2) -> Process:
        """Start `delaytasks run --forever`."""
        name = f"run{len(self._processes)}"
        command = ["run", "--forever", "-c", str(concurrency), *options]
        process = self.python(name, "delaytasks", *command)
        process.wait_for(STARTED, 30)
        return process

    def drain(self, *options: str, deadline_s: float = 30) -> dict[str, Any]:
        """Run `delaytasks run` to its end, and return its summary."""
        process = self.python("run", "delaytasks", "run", "--json", *options)
        wait_until(process.ended, deadline_s, f"the drain to end\n{process.log()}", every_s=0.05)
        document = re.search(r"^\{$.*^\}$", process.log(), re.MULTILINE | re.DOTALL)
        assert document is not None, process.log()
        summary: dict[str, Any] = json.loads(document[0])
        return summary

    def now(self) -> datetime:
        """Return the time of the database, as producers know it."""
        return runtime_of(self.delays).clock.now()

    def sweep(self) -> None:
        runtime_of(self.delays).sweeper.sweep()

    def arm(self, entries: Iterable[Entry]) -> bool:
        """Send messages that name these entries, or store them in the Redis timer."""
        return runtime_of(self.delays).producer_timer.arm(entries)

    def counted(self) -> Mapping[Status, int]:
        """Return the number of rows in each status."""
        return counted(self.store)

    @property
    def timer_is_up(self) -> bool:
        return runtime_of(self.delays).producer_timer.is_up

    def timer_slots(self) -> list[list[int]]:
        """Return the ids that wait in each slot of the Redis timer."""
        timer = runtime_of(self.delays).redis_timer
        if timer is None:
            return []
        client, slots = timer.link.connect(), timer.slots("default")
        members = [client.zrange(timer.keys(slot)[0], 0, -1) for slot in slots]
        found = [[int(one.split(b":")[0]) for one in some if one != b"."] for some in members]
        return [ids for ids in found if ids]

    @property
    def queue_name(self) -> str:
        """The name of the default queue in the broker."""
        name: str = runtime_of(self.delays).publisher.queue("default").name
        return name

    @contextmanager
    def broker_queue(self) -> Iterator[Any]:
        """Yield the default queue on a connection to the broker."""
        runtime = runtime_of(self.delays)
        with runtime.celery.connection_for_write() as connection:
            queue = runtime.publisher.queue("default")(connection)
            queue.declare()
            yield queue

    def queued(self) -> int:
        """Return the number of messages in the default queue."""
        with self.broker_queue() as queue:
            return int(queue.queue_declare(passive=False).message_count)

    def node(self, number: int) -> str:
        """Return the name of the worker with this process number; it is unique among all tests."""
        return f"w{number}@{self.settings['namespace']}"

    def beat(self, level: str = "INFO", **more: str) -> Process:
        schedule = self.folder / f"beat{len(self._processes)}"
        return self._start("beat", "beat", "-s", str(schedule), "-l", level, **more)

    def flower(self, *options: str) -> str:
        """Start Flower with its API, and return its address."""
        port = free_port()
        command = ["flower", "--address=127.0.0.1", f"--port={port}", *options]
        process = self._start("flower", *command, FLOWER_UNAUTHENTICATED_API="true")
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert not process.ended(), process.log()
            try:
                return requests.get(f"{url}/healthcheck", timeout=5).ok
            except requests.ConnectionError:
                return False

        wait_until(answers, 30, "Flower to answer", every_s=0.1)
        return url

    def command(self, *arguments: str, deadline_s: float = 30) -> Process:
        """Run a command of Celery to its end; its output is its log."""
        process = self._start(arguments[0], *arguments)
        wait_until(process.ended, deadline_s, f"celery {' '.join(arguments)} to end", every_s=0.05)
        return process

    def python(self, name: str, module: str, *arguments: str, **more: str) -> Process:
        """Run a module as a program, in which `delaytasks.celery` belongs to this deployment."""
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        log_file = self.folder / f"{len(self._processes)}-{name}.log"
        process = Process(command, self._environment(**more), log_file, name)
        self._processes.append(process)
        return process

    def _start(self, name: str, *arguments: str, **more: str) -> Process:
        return self.python(name, "celery", "-A", "delaytasks", *arguments, **more)

    def _environment(self, **more: str) -> dict[str, str]:
        config = self.folder / "test_celeryconfig.py"
        conf: dict[str, Any] = {"imports": ["tests.project"], **self.conf}
        conf.setdefault("delaytasks_database_url", self._database_url)
        conf |= {f"delaytasks_{key}": value for key, value in self.settings.items()}
        written = "".join(f"{key} = {value!r}\n" for key, value in conf.items())
        if not config.exists() or config.read_text() != written:
            config.write_text(written)  # otherwise another process may be reading it
        path = [str(self.folder), str(ROOT), *filter(None, [more.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(path), "CELERY_CONFIG_MODULE": "test_celeryconfig"}
        return {**os.environ, **more, **own}

    # -- results ----------------------------------------------------------------------------------

    def schedule(self, tag: str = "test.note", delay: float = 0, **options: Any) -> DelayedTask:
        body = {"file": str(self.file), **options.pop("body", {})}
        return self.delays.schedule_delay(tag, body, delay, **options)

    def insert(self, in_s: float | None = None, **values: Any) -> None:
        """Insert a row as another program does, of which no message is sent."""
        row = {"tag": "test.note", "message_body": json.dumps({"file": str(self.file)}), **values}
        if in_s is not None:
            row["expected_time"] = db_now_plus(in_s)
        with self.store.database.begin() as connection:
            connection.execute(insert(self.store.schema.tasks).values(**row))

    def runs(self, kind: str = "") -> list[list[str]]:
        """Return what the processors noted, or only the notes of a kind such as `began`."""
        lines = [line.split() for line in self.file.read_text().splitlines()]
        return [line for line in lines if line[1] == kind] if kind else lines

    def lateness_s(self) -> list[float]:
        """Return how many seconds after its due time each run of `test.note` began."""
        return [int(run[1]) / 1e6 for run in self.runs() if run[1].isdigit()]

    def stats(self, number: int = 0) -> dict[str, Any]:
        """Return our section of `celery inspect stats` of the worker with this process number."""
        node, control = self.node(number), runtime_of(self.delays).celery.control
        answer = control.inspect([node], timeout=10, limit=1).stats() or {}
        found: dict[str, Any] = answer.get(node, {}).get("delaytasks", {})
        return found

    def at_work(self, task: DelayedTask) -> Process:
        """Return the worker that began the task last, according to its processor's notes."""
        began = [run[2] for run in self.runs("began") if run[0] == str(task.id)]
        session = os.getsid(int(began[-1]))
        return next(process for process in self._processes if process.pid == session)

    def r1_s(self) -> float:
        """R1 of docs/guarantees.md, without beat: the time until a sweep recovers a lost entry."""
        return float(self.settings["_grace_s"] + self.settings["_self_sweep_s"] + DISPATCH_S)

    def r2_s(self) -> float:
        """R2, without beat: the time until a task of a dead worker runs again."""
        return float(self.settings["lease"] + self.settings["_self_sweep_s"] + DISPATCH_S)

    def status(self, task: DelayedTask) -> Status:
        return self.delays.get(task).status

    def early(self) -> list[int]:
        """Return the tasks that began before their due time, by the database's clock."""
        t = self.store.schema.tasks.c
        query = select(t.id).where(t.status == int(Status.DONE), t.execution_time < t.expected_time)
        found = self.store.database.autocommitted(lambda c: c.scalars(query).all())
        return list(found)

    def wait_for(
        self, tasks: Iterable[DelayedTask], status: Status = Status.DONE, deadline_s: float = 20
    ) -> None:
        for task in tasks:
            wait_until(
                lambda task=task: self.status(task) is status,  # type: ignore[misc]
                deadline_s,
                lambda task=task: (
                    f"task {task.tag} to be {status.name}: {self.delays.get(task)}\n{self.stacks()}"
                ),  # type: ignore[misc]
                every_s=0.05,
            )

    def runs_on_time(self) -> bool:
        """Return whether a task begins earlier than a sweep would find it."""
        task = self.schedule(delay=0.3)
        self.wait_for([task], deadline_s=30)
        return next(int(run[1]) for run in self.runs() if run[0] == str(task.id)) < 200_000

    def stacks(self) -> str:
        """Return the logs, after all worker processes have written the stacks of their threads.

        Processes that are not workers may end from the signal.
        """
        for process in self._processes:
            process.stacks()
        return self.logs()

    def logs(self) -> str:
        return "\n".join(f"--- {p.log_file.name}\n{p.log()[-20_000:]}" for p in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.end()
        runtime_of(self.delays).flush()  # later messages would stay in the broker
        self.store.schema.metadata.drop_all(self.store.database.tx)
        if self.settings.get("timer") != "direct":
            self._delete_queues()
        self.delays.close()

    def _delete_queues(self) -> None:
        with runtime_of(self.delays).celery.connection_for_write() as connection:
            for name in {"default", "mail", "celery", self.delays.settings.default_queue}:
                queue = runtime_of(self.delays).publisher.queue(name)(connection)
                try:
                    queue.delete()
                    queue.exchange.delete()
                except connection.channel_errors + connection.connection_errors:
                    pass
            delete_keys(connection, self.settings["namespace"])
        if "://" in (timer := self.settings.get("timer", "")):
            with Redis.from_url(timer) as client:
                _delete_keys(client, self.settings["namespace"])


def delete_keys(connection: Any, name: str) -> None:
    """Delete the keys of kombu's queues and exchanges whose names contain `name`."""
    if connection.transport.driver_type == "redis":
        _delete_keys(connection.default_channel.client, name)


def _delete_keys(client: Any, name: str) -> None:
    for key in client.scan_iter(f"*{name}*", count=1000):
        client.delete(key)


class Process:
    def __init__(
        self, command: list[str], environment: dict[str, str], log_file: Path, name: str = ""
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._popen = spawn(command, log_file, env=environment, cwd=log_file.parent)
        self.pid = self._popen.pid

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_for(self, text: str, deadline_s: float = 20) -> None:
        """Wait until the log contains `text`. The process must not end before."""
        wait_until(
            lambda: text in self.log() or self.ended(),
            deadline_s,
            lambda: f"{text!r} in the log\n{self.stacks()}",
            every_s=0.05,
        )
        assert text in self.log(), self.log()

    def ended(self) -> bool:
        return self.status is not None

    @property
    def status(self) -> int | None:
        """Return the exit status, or None."""
        return self._popen.poll()

    def terminate(self, deadline_s: float = 20) -> None:
        self._popen.send_signal(signal.SIGTERM)
        wait_until(self.ended, deadline_s, lambda: f"the worker to stop\n{self.stacks()}")

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stacks(self) -> str:
        """Return the log, after the process and its children have written the stacks of their
        threads.
        """
        if not self.ended():
            os.killpg(self.pid, STACKS)
            time.sleep(0.5)
        return self.log()[-20_000:]

    def end(self) -> None:
        """End the process. While coverage is measured it first has 10 s to stop, since a killed
        process writes nothing down.
        """
        if "coverage" in sys.modules and not self.ended():
            self._popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(10)
        self.kill()

    def kill(self) -> None:
        """Kill the process with its children, which are in its session."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.wait()


# -- Find the processes that a test started directly or indirectly --------------------------------


def marked(*marks: str) -> dict[int, str]:
    """Return the command line of each process whose command line or environment contains a mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            searched = line + b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if line and any(mark.encode() in searched for mark in marks):
            found[int(folder.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


# -- Processes with a wrong wall clock, by libfaketime --------------------------------------------

# Their monotonic clock is unchanged, as on a host whose time was set wrongly.


#: The paths of Debian's and Fedora's package, then of manual builds.
_PLACES = ("/usr/lib/*", "/usr/lib", "/usr/lib64", "/usr/local/lib")
MISSING = "libfaketime is not installed (Debian: apt-get install faketime)"


def library() -> Path | None:
    """Return the path of the library for programs with threads."""
    name = "faketime/libfaketimeMT.so.1"
    return next((file for place in _PLACES for file in Path("/").glob(f"{place[1:]}/{name}")), None)


def environment(offset_s: int) -> dict[str, str]:
    """Return the environment of a process whose clock is `offset_s` seconds ahead."""
    return {**_environment(), "FAKETIME": f"{offset_s:+d}"}


class Dial:
    """Sets the clock of running processes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        own = {"FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}
        self.environment = {**_environment(), **own}

    def set(self, ahead_s: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}")
        new.replace(self._file)  # a reader finds either the old or the new file


def _environment() -> dict[str, str]:
    file = library()
    if file is None:
        raise RuntimeError(MISSING)
    return {
        "LD_PRELOAD": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).parent / "wrong_clock"),
    }


def forget_the_dead() -> None:
    """Delete the shared memory of killed processes."""
    for pattern in ("faketime_shm_", "sem.faketime_sem_"):
        for file in Path("/dev/shm").glob(f"{pattern}*"):
            pid = file.name.removeprefix(pattern)
            if pid.isdigit() and not Path("/proc", pid).exists():
                file.unlink(missing_ok=True)
