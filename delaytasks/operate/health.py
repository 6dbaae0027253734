"""The checks of `delaytasks status --probe` and of the probes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.db import migrations
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import LostWorker, RegisteredWorker
from delaytasks.loops import within
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import DelayTaskError, StoreUnavailableError
from delaytasks.model.inputs import ALL_QUEUES, POLLING_PREFIX, show_duration
from delaytasks.model.text import some_values
from delaytasks.operate.state import beat_age_s
from delaytasks.operate.state_queries import READ_ONLY, OverdueRows, Stats, server_problem
from delaytasks.settings import Settings


class HealthQuestion(NamedTuple):
    """The processes to check, and the limits.

    Attributes
    ----------
    component
        - `deployment`: the database, the sweeps, at least one worker, and a worker for each
          queue that has late tasks.
        - `worker`: the workers of one host.
        - `run`: the processes of `delaytasks run --forever` of one host.
        - `beat`: beat. Workers know when its last message arrived.
        - `api`: a server of the HTTP API or of the console, which only needs the database.
    host
        The host of these processes.
    name
        The name of one worker, instead of all of the host.
    max_overdue
        More overdue tasks are unhealthy. With None they are not counted.
    max_sweep_age_s
        An older sweep is unhealthy. With None this is the time after which a worker would have
        swept by itself, and one sweep interval more.
    timeout_s
        The time that the database has to answer.
    """

    component: str = "deployment"
    host: str = ""
    name: str | None = None
    max_overdue: int | None = None
    max_sweep_age_s: float | None = None
    timeout_s: float = 5.0

    def is_about(self, worker: RegisteredWorker | LostWorker) -> bool:
        """Return whether the question is about this worker."""
        if self.component == "deployment":
            return True
        is_drain = worker.pool.startswith(POLLING_PREFIX)
        if is_drain != (self.component == "run"):
            return False
        return worker.name == self.name or (
            self.name is None and worker.name.rpartition("@")[2] == self.host
        )


class HealthCheck(NamedTuple):
    """The result of one check, with its facts in a sentence."""

    name: str
    is_ok: bool
    detail: str


class HealthChecks:
    """Checks a deployment.

    Parameters
    ----------
    store, settings
        The tables and the settings of the deployment.
    broker_error
        Returns the error of the broker, or None if it answers. By default the broker is not asked.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        broker_error: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._broker_error = broker_error
        #: The time after which a worker would have swept by itself, and one interval more.
        self._sweep_limit_s = settings.self_sweep_s + settings.sweep_s

    def live(self, question: HealthQuestion) -> list[HealthCheck]:
        """Return a check that fails only if a restart of the process would help.

        Without the database, or while it is read-only, it is unknown whether the process works.
        A restart would not change that, so the check succeeds then.
        """
        name = "beat" if question.component == "beat" else "worker"
        try:
            return self._in_time(question, self._live)
        except DelayTaskError:
            return [HealthCheck(name, True, "unknown, because the database does not answer")]

    def ready(self, question: HealthQuestion) -> list[HealthCheck]:
        """Return the checks that all succeed if tasks can run on time."""
        try:
            found = self._in_time(question, self._ready)
        except DelayTaskError as error:
            found = [HealthCheck("database", False, str(error))]
        if self._settings.uses_broker and question.component not in ("api", "run"):
            broker_error = self._broker_error()
            found.append(HealthCheck("broker", broker_error is None, broker_error or "answers"))
        return found

    def _in_time(
        self,
        question: HealthQuestion,
        checks: Callable[[HealthQuestion, datetime], Iterator[HealthCheck]],
    ) -> list[HealthCheck]:
        """Return the checks; raise a `DelayTaskError` if the database answers too late."""
        try:
            return within(
                question.timeout_s, lambda: list(checks(question, self._store.tasks.now()))
            )
        except TimeoutError:
            late = f"no answer within {show_duration(question.timeout_s)}"
            raise StoreUnavailableError(late) from None

    def _live(self, question: HealthQuestion, now: datetime) -> Iterator[HealthCheck]:
        check = self._process_check(question, now, self._workers(now))
        if not check.is_ok and server_problem(self._store.database) == READ_ONLY:
            text = "unknown, because the database is read-only"  # nobody can report
            check = HealthCheck(check.name, True, text)
        yield check

    def _ready(self, question: HealthQuestion, now: datetime) -> Iterator[HealthCheck]:
        store, most = self._store, question.max_overdue
        is_ok = server_problem(store.database) != READ_ONLY
        yield HealthCheck("database", is_ok, "answers" if is_ok else READ_ONLY)
        yield self._revision_check()
        if question.component == "api":  # a producer's role may not read the other tables
            return
        workers = self._workers(now)
        yield self._process_check(question, now, workers)
        if question.component == "deployment":
            yield self._queues_check(workers)
        if question.component != "beat":
            yield self._sweep_check(question, now)
        if most is not None:
            # More than one beyond the limit need not be counted.
            overdue = OverdueRows(store.database, store.schema)
            tasks = overdue.count(self._settings.grace_s, most + 1).tasks
            found = f"{tasks:,}" if tasks <= most else f"more than {most:,}"
            yield HealthCheck("overdue", tasks <= most, f"{found} overdue, at most {most:,}")

    def _workers(self, now: datetime) -> Sequence[RegisteredWorker]:
        return self._store.workers.registered(now, self._settings.silent_s)

    def _revision_check(self) -> HealthCheck:
        """Compare the tables with this version, which also works with tables of a newer one.

        Migrations store the revision, also those of Django. `testing.create_tables` stores none.
        """
        database, settings = self._store.database, self._settings
        names = (settings.name_prefix, settings.table_schema or None)
        found, head = migrations.current(database, *names), migrations.head()
        if found is None and not migrations.has_tables(database, self._store.schema):
            return HealthCheck("tables", False, f"they are missing; {database.tables_remedy}")
        detail = f"revision {found or 'unknown'}, this version has {head}"
        if found is None or found >= head:
            return HealthCheck("tables", True, detail)
        return HealthCheck("tables", False, f"{detail}; {database.tables_remedy}")

    def _process_check(
        self, question: HealthQuestion, now: datetime, workers: Sequence[RegisteredWorker]
    ) -> HealthCheck:
        """Check that beat or a worker lives. On one host, all that are registered have to live."""
        if question.component == "beat":
            return self._beat_check(workers)
        asked = [worker for worker in workers if question.is_about(worker)]
        silent = [worker for worker in asked if not worker.is_alive]
        alive = [worker for worker in asked if worker.is_alive]
        lost = _lost_text(list(filter(question.is_about, self._store.workers.lost())), now)
        if not asked:
            return HealthCheck("worker", False, f"none is registered{_place(question)}{lost}")
        if not alive or (silent and question.component != "deployment"):
            last = min(silent, key=lambda worker: worker.name)
            text = f"{last.name} has not reported for {show_duration(last.age_s)}"
            return HealthCheck("worker", False, text + lost)
        newest = min(alive, key=lambda worker: worker.age_s)
        more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        text = f"{newest.name} ({show_duration(newest.age_s)} ago){more}{lost}"
        return HealthCheck("worker", True, text)

    def _beat_check(self, workers: Sequence[RegisteredWorker]) -> HealthCheck:
        """Check that messages of beat arrive, as far as live workers with a broker know."""
        age_s = beat_age_s(workers)
        if age_s is None:
            return HealthCheck("beat", True, "unknown, because no worker receives its messages")
        limit = show_duration(self._sweep_limit_s)
        detail = f"last message {show_duration(age_s)} ago, at most {limit}"
        return HealthCheck("beat", age_s <= self._sweep_limit_s, detail)

    def _queues_check(self, workers: Sequence[RegisteredWorker]) -> HealthCheck:
        """Look for queues with late tasks and no live worker. A paused queue needs none."""
        store, served = self._store, {q for each in workers if each.is_alive for q in each.queues}
        queues: Sequence[str] = ()
        if served and ALL_QUEUES not in served:
            policies = store.policies.read()
            paused = {each.name for each in policies if each.kind == "queue" and each.is_paused}
            overdue = OverdueRows(store.database, store.schema)
            queues = sorted(overdue.other_queues(served | paused, self._sweep_limit_s))
        if not queues:
            return HealthCheck("queues", True, "each queue with late tasks has a worker")
        text = f"no live worker serves {some_values(queues)}, where tasks are late"
        return HealthCheck("queues", False, text)

    def _sweep_check(self, question: HealthQuestion, now: datetime) -> HealthCheck:
        given_s = question.max_sweep_age_s
        limit_s = self._sweep_limit_s if given_s is None else given_s
        stats = Stats(self._store.database, self._store.schema)
        oldest_s = 0.0
        for sweep in stats.sweeps(self._settings, now):
            if sweep.age_s is None:
                return HealthCheck("sweep", False, "there was no sweep yet")
            oldest_s = max(oldest_s, sweep.age_s)
        detail = f"{show_duration(oldest_s)} ago, at most {show_duration(limit_s)}"
        return HealthCheck("sweep", oldest_s <= limit_s, detail)


def _lost_text(lost: Sequence[LostWorker], now: datetime) -> str:
    """Return a clause about the lost workers, which does not change the result of the check."""
    if not lost:
        return ""
    ago = show_duration((now - lost[0].lost_at).total_seconds())
    more = f" (and {len(lost) - 1} more within the hour)" if len(lost) > 1 else ""
    return f"; {lost[0].name} was lost {ago} ago{more}"


def _place(question: HealthQuestion) -> str:
    if question.component == "deployment":
        return ""
    return f" on {question.host}" if question.name is None else f" with the name {question.name}"


# -- URLs for the probes of a server: whether it lives, and whether it is ready for requests ------

# The HTTP API and the console have them.


#: What a view of Flask may return: the text, the status and the headers.
ProbeAnswer = tuple[str, int, dict[str, str]]

#: The names of the URLs in an app.
ENDPOINTS = ("health_live", "health_ready")
#: Anyone may call these URLs, so the database is asked once in this time.
ASK_AGAIN_S = 1.0
#: The time that the database has to answer.
READY_ANSWER_S = 1.0


class Probes:
    """Answers without an API key or a login, and therefore without the texts of errors."""

    def __init__(self, checks: Callable[[], HealthChecks]) -> None:
        """`checks` is called before each question to the database, and not at the start."""
        self._checks = checks
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._results: Mapping[str, bool] = {}

    def add_to(self, app: Any) -> None:
        """Add the URLs to a Flask application."""
        app.add_url_rule("/health/live", "health_live", lambda: _answer({}))
        app.add_url_rule("/health/ready", "health_ready", lambda: _answer(self._ready()))

    def _ready(self) -> Mapping[str, bool]:
        """Return whether each check succeeds. Callers need the database, and no broker.

        While one thread asks, others answer from the last result, so that probes during an outage
        do not block the threads that serve requests.
        """
        if self._lock.acquire(blocking=not self._results):
            try:
                if monotonic() - self._asked_at > ASK_AGAIN_S:
                    self._results = self._ask()
                    self._asked_at = monotonic()
            finally:
                self._lock.release()
        return self._results

    def _ask(self) -> Mapping[str, bool]:
        found = self._checks().ready(HealthQuestion("api", timeout_s=READY_ANSWER_S))
        return {check.name: check.is_ok for check in found}


def _answer(checks: Mapping[str, bool]) -> ProbeAnswer:
    is_healthy = all(checks.values())
    text = json.dumps({"is_healthy": is_healthy, "checks": checks})
    return text, 200 if is_healthy else 503, {"Content-Type": "application/json"}
