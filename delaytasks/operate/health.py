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
from delaytasks.loops import within
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import DelayTaskError, StoreUnavailableError
from delaytasks.model.inputs import ALL_QUEUES, show_duration
from delaytasks.model.text import some_values
from delaytasks.model.workers import (
    ONLY_DRAINING_PREFIX,
    POLLING_PREFIX,
    LostWorker,
    RegisteredWorker,
)
from delaytasks.operate.state import beat_age_s
from delaytasks.operate.state_queries import READ_ONLY, OverdueRows, Stats, Swept
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
        if worker.pool.startswith(ONLY_DRAINING_PREFIX):
            return False
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


class _Answer(NamedTuple):
    """The answer of the database."""

    now: datetime
    #: None if `delaytasks.testing.create_tables` made the tables, or if there are none.
    revision: str | None
    has_tables: bool
    is_read_only: bool
    workers: Sequence[RegisteredWorker] = ()
    lost: Sequence[LostWorker] = ()
    swept: Sequence[Swept] = ()
    overdue: int = 0
    #: Queues with late tasks that no live worker serves.
    unserved: Sequence[str] = ()


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

    def live(self, question: HealthQuestion) -> list[HealthCheck]:
        """Return a check that fails only if a restart of the process would help.

        Without the database, or while it is read-only, it is unknown whether the process works.
        A restart would not change that, so the check succeeds then.
        """
        try:
            answer = self._ask(question._replace(max_overdue=None))
        except DelayTaskError:
            name = "beat" if question.component == "beat" else "worker"
            return [HealthCheck(name, True, "unknown, because the database does not answer")]
        is_beat = question.component == "beat"
        check = self._beat_check(answer) if is_beat else _worker_check(answer, question)
        if answer.is_read_only and not check.is_ok:  # nobody can report
            check = HealthCheck(check.name, True, "unknown, because the database is read-only")
        return [check]

    def ready(self, question: HealthQuestion) -> list[HealthCheck]:
        """Return the checks that all succeed if tasks can run on time."""
        return list(self._ready(question))

    def _ready(self, question: HealthQuestion) -> Iterator[HealthCheck]:
        answer: _Answer | None = None
        try:
            answer = self._ask(question)
        except DelayTaskError as error:
            yield HealthCheck("database", False, str(error))
        else:
            is_ok = not answer.is_read_only
            yield HealthCheck("database", is_ok, "answers" if is_ok else READ_ONLY)
            yield _revision_check(answer, self._store.database.tables_remedy)
        if question.component == "api":
            return
        if answer is not None and question.component != "beat":
            yield _worker_check(answer, question)
        if answer is not None and question.component == "deployment":
            yield _queues_check(answer)
        if self._settings.uses_broker and question.component != "run":
            broker_error = self._broker_error()
            yield HealthCheck("broker", broker_error is None, broker_error or "answers")
        if answer is None:
            return
        is_beat = question.component == "beat"
        yield self._beat_check(answer) if is_beat else self._sweep_check(answer, question)
        if question.max_overdue is not None:
            is_ok = answer.overdue <= question.max_overdue
            found = f"{answer.overdue:,}" if is_ok else f"more than {question.max_overdue:,}"
            detail = f"{found} overdue, at most {question.max_overdue:,}"
            yield HealthCheck("overdue", is_ok, detail)

    def _ask(self, question: HealthQuestion) -> _Answer:
        """Return the answer of the database; raise a `DelayTaskError` if it comes too late."""
        try:
            return within(question.timeout_s, lambda: self._answer(question))
        except TimeoutError:
            late = f"no answer within {show_duration(question.timeout_s)}"
            raise StoreUnavailableError(late) from None

    def _answer(self, question: HealthQuestion) -> _Answer:
        settings, store = self._settings, self._store
        now = store.tasks.now()
        names = (settings.name_prefix, settings.table_schema or None)
        revision = migrations.current(store.database, *names)
        has_tables = revision is not None or migrations.has_tables(store.database, store.schema)
        stats = Stats(store.database, store.schema)
        is_read_only = stats.is_read_only()
        if question.component == "api":  # a producer's role may not read the other tables
            return _Answer(now, revision, has_tables, is_read_only)
        overdue = OverdueRows(store.database, store.schema)
        most, workers = question.max_overdue, store.workers.registered(now, settings.silent_s)
        return _Answer(
            now,
            revision,
            has_tables,
            is_read_only,
            workers,
            store.workers.lost(),
            stats.sweeps(settings.sweep_partitions),
            # More than one beyond the limit need not be counted.
            0 if most is None else overdue.count(settings.grace_s, most + 1).tasks,
            self._unserved(store, workers) if question.component == "deployment" else (),
        )

    def _unserved(self, store: Store, workers: Sequence[RegisteredWorker]) -> Sequence[str]:
        """Return queues with late tasks that no live worker serves. A paused queue needs none."""
        alive = [worker for worker in workers if worker.is_alive]
        served = {queue for worker in alive for queue in worker.queues}
        if not alive or ALL_QUEUES in served:
            return ()
        policies = store.policies.read()
        paused = {each.name for each in policies if each.kind == "queue" and each.is_paused}
        overdue = OverdueRows(store.database, store.schema)
        return overdue.other_queues(served | paused, self._sweep_limit_s)

    @property
    def _sweep_limit_s(self) -> float:
        """The time after which a worker would have swept by itself, and one interval more."""
        return self._settings.self_sweep_s + self._settings.sweep_s

    def _beat_check(self, answer: _Answer) -> HealthCheck:
        """Check that messages of beat arrive, as far as live workers with a broker know."""
        age_s = beat_age_s(answer.workers)
        if age_s is None:
            return HealthCheck("beat", True, "unknown, because no worker receives its messages")
        limit = show_duration(self._sweep_limit_s)
        detail = f"last message {show_duration(age_s)} ago, at most {limit}"
        return HealthCheck("beat", age_s <= self._sweep_limit_s, detail)

    def _sweep_check(self, answer: _Answer, question: HealthQuestion) -> HealthCheck:
        given_s = question.max_sweep_age_s
        limit_s = self._sweep_limit_s if given_s is None else given_s
        ages = [one.age_s(answer.now) for one in answer.swept]
        known = [age_s for age_s in ages if age_s is not None]
        if len(known) < len(ages):
            return HealthCheck("sweep", False, "there was no sweep yet")
        oldest_s = max(known)
        detail = f"{show_duration(oldest_s)} ago, at most {show_duration(limit_s)}"
        return HealthCheck("sweep", oldest_s <= limit_s, detail)


def _revision_check(answer: _Answer, remedy: str) -> HealthCheck:
    """Compare the tables with this version, which also works with tables of a newer one.

    Migrations store the revision, also those of Django. `testing.create_tables` stores none.
    """
    if not answer.has_tables:
        return HealthCheck("tables", False, f"they are missing; {remedy}")
    head = migrations.head()
    is_ok = answer.revision is None or answer.revision >= head
    found = "unknown" if answer.revision is None else answer.revision
    detail = f"revision {found}, this version has {head}"
    return HealthCheck("tables", is_ok, detail if is_ok else f"{detail}; {remedy}")


def _worker_check(answer: _Answer, question: HealthQuestion) -> HealthCheck:
    """Check that a worker lives. On one host, all that are registered have to live."""
    workers = [worker for worker in answer.workers if question.is_about(worker)]
    ages = {worker.name: worker.age_s for worker in workers}
    alive = {worker.name for worker in workers if worker.is_alive}
    silent, lost = sorted(ages.keys() - alive), _lost_text(answer, question)
    is_ok = bool(alive) and (question.component == "deployment" or not silent)
    if not ages:
        return HealthCheck("worker", False, f"none is registered{_place(question)}{lost}")
    if is_ok:
        newest = min(alive, key=ages.__getitem__)
        more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        detail = f"{newest} ({show_duration(ages[newest])} ago){more}{lost}"
        return HealthCheck("worker", True, detail)
    last = f"{silent[0]} has not reported for {show_duration(ages[silent[0]])}"
    return HealthCheck("worker", False, last + lost)


def _queues_check(answer: _Answer) -> HealthCheck:
    queues = sorted(set(answer.unserved))
    if not queues:
        return HealthCheck("queues", True, "each queue with late tasks has a worker")
    named = some_values(queues)
    return HealthCheck("queues", False, f"no live worker serves {named}, where tasks are late")


def _lost_text(answer: _Answer, question: HealthQuestion) -> str:
    """Return a clause about the lost workers, which does not change the result of the check."""
    lost = [worker for worker in answer.lost if question.is_about(worker)]
    if not lost:
        return ""
    age_s = (answer.now - lost[0].lost_at).total_seconds()
    more = f" (and {len(lost) - 1} more within the hour)" if len(lost) > 1 else ""
    return f"; {lost[0].name} was lost {show_duration(age_s)} ago{more}"


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
