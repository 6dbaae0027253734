"""Judges a deployment: the verdict in words, and the checks of `status --probe`.

The console, `delaytasks status` and `status --watch` show the verdict about a snapshot of the
state. The checks read less, because a probe has little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from delaytasks.db import migrations
from delaytasks.db.sweep_queries import LostWorker, RegisteredWorker
from delaytasks.loops import within
from delaytasks.model.clock import UTC
from delaytasks.model.errors import DelayTaskError, StoreUnavailableError
from delaytasks.model.inputs import ALL_QUEUES, POLLING_PREFIX, show_duration
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import QueuePlace
from delaytasks.model.text import count, some_values
from delaytasks.operate.state import (
    NO_STANDBY,
    READ_ONLY,
    DeploymentState,
    FailedNow,
    RecentRuns,
    ask_broker,
    beat_age_s,
    broker_down_s,
    count_overdue,
    server_problem,
)
from delaytasks.operate.statistics import LATE_RANGE
from delaytasks.operate.why import LATE_BECAUSE

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


# -- The sentences of a verdict, and the words that they share ------------------------------------


Severity = Literal["good", "note", "warning", "bad"]
SEVERITIES: Sequence[Severity] = ("good", "note", "warning", "bad")


class Problem(NamedTuple):
    """One sentence, and the page of the console that shows more."""

    level: Severity
    text: str
    #: The overview has more below the sentences.
    page: str = "overview"
    #: The parameters of the page.
    parameters: Mapping[str, str] = {}


def clock_time(at: datetime, now: datetime, zone: tzinfo) -> str:
    """Return a time of day, with the date unless it is today."""
    local = at.astimezone(zone)
    is_today = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M %Z}" if is_today else f"{local:%b %d, %H:%M %Z}"


def since_text(seconds: float, now: datetime, zone: tzinfo) -> str:
    """Return when something began, for example "since 14:02 UTC (3m)"."""
    at = clock_time(now - timedelta(seconds=seconds), now, zone)
    return f"since {at} ({show_duration(seconds)})"


def tasks_are(number: int) -> str:
    """Return, for example, "1 task is" or "1,200 tasks are"."""
    return "1 task is" if number == 1 else f"{number:,} tasks are"


def runs_have(number: int, tag: str | None = None) -> str:
    """Return, for example, "1 run of mail.send has" or "12 runs have"."""
    of = "" if tag is None else f" of {tag}"
    return f"1 run{of} has" if number == 1 else f"{number:,} runs{of} have"


# -- Judges the failures of a deployment, for the verdict -----------------------------------------


#: Failed runs that are retried are a warning if they are more, and a note otherwise. The alert
#: `DelayTasksFailing` has the same limits for tasks.
FEW_RUNS, SMALL_SHARE = 5, 0.05
#: Tags that are named in one sentence.
NAMED_TAGS = 3


def failure_problems(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    news = [group for group in state.groups if group.is_news]
    others = state.failed - sum(group.tasks for group in news)
    for group in news:
        text = f"{_failures(group, state, zone)}: {group.summary}"
        yield Problem("bad", text, "failure", {"name": group.name})
    for group, runs in _retried(state):
        failures = _failed_runs(group, runs, state.now, zone)
        level: Severity = "warning" if _is_much(runs) else "note"
        text = f"{failures}, and will be retried: {group.summary}"
        yield Problem(level, text, "failure", {"name": group.name})
    if state.failed and not news:
        text = f"{tasks_are(state.failed)} failed, but none in the last hour."
        yield Problem("note", text, "failures")
    elif state.has_all_failures and others:
        text = f"{count(others, 'other task')} failed more than an hour ago."
        yield Problem("note", text, "failures")
    if waiting := {group.tag for group in state.groups if group.is_retried and not group.recent}:
        tags = some_values(sorted(waiting), NAMED_TAGS)
        text = f"Failed runs of {tags} wait for a retry, but none is of the last hour."
        yield Problem("note", text, "failures")


def _retried(state: DeploymentState) -> list[tuple[FailedNow, RecentRuns]]:
    """Return the groups whose failed runs are retried, and are news."""
    return [
        (group, group.recent)
        for group in state.groups
        if group.is_retried and group.recent is not None and not group.is_news
    ]


def _is_much(runs: RecentRuns) -> bool:
    return runs.runs > FEW_RUNS and runs.share > SMALL_SHARE


def _failures(group: FailedNow, state: DeploymentState, zone: tzinfo) -> str:
    """Return how many tasks have failed, and since when; or how many runs, if no task was read."""
    if not group.tasks and group.recent is not None:
        return _failed_runs(group, group.recent, state.now, zone)
    least = "" if state.has_all_failures else "At least "
    verb = "has failed at" if group.tasks == 1 else "have failed since"
    since = "" if group.since is None else clock_time(group.since, state.now, zone)
    return f"{least}{count(group.tasks, 'task')} of {group.tag} {verb} {since}"


def _failed_runs(group: FailedNow, runs: RecentRuns, now: datetime, zone: tzinfo) -> str:
    return f"{runs_have(runs.runs, group.tag)} failed since {clock_time(runs.since, now, zone)}"


#: Problems that are named.
MOST_PROBLEMS = 6
#: Lost workers that are named.
NAMED_WORKERS = 3
#: A larger offset of a worker's clock is mentioned. The database's clock decides in any case.
CLOCK_S = 5.0
#: An outage of a worker's broker or timer, or a silence of beat, that is longer is mentioned.
LEAST_OUTAGE_S = 15.0


@dataclass(frozen=True)
class Verdict:
    """`headline` answers whether tasks run on time; `problems` begin with the worst."""

    level: Severity
    headline: str
    problems: Sequence[Problem]

    def as_json(self) -> dict[str, Any]:
        problems = [{"level": each.level, "text": each.text} for each in self.problems]
        return {"level": self.level, "headline": self.headline, "problems": problems}


def verdict_of(
    state: DeploymentState, zone: tzinfo = UTC, ahead: Sequence[Problem] = ()
) -> Verdict:
    """Judge a state. Times of day are in `zone`.

    `ahead` has problems that will make tasks late.
    """
    if state.error is not None:
        text = f"The database does not answer: {state.error}"
        return Verdict("bad", "Unknown. The database does not answer.", [Problem("bad", text)])
    if state.problem == READ_ONLY:
        text = f"The database answers, but {READ_ONLY}."
        return Verdict("bad", "Stopped. The database is read-only.", [Problem("bad", text)])
    tasks = [*_stopped(state), *_late(state), *failure_problems(state, zone), *ahead]
    others = [*_services(state, zone), *_workers(state, zone), *_held_back(state, zone)]
    others += [*_paused(state, zone), *_lost(state, zone), *_late_starts(state)]
    worst_first = sorted([*tasks, *others], key=lambda each: -SEVERITIES.index(each.level))
    level = worst_first[0].level if worst_first else "good"
    return Verdict(level, _headline(state, bool(ahead)), worst_first[:MOST_PROBLEMS])


def _headline(state: DeploymentState, is_peak_ahead: bool) -> str:
    if not state.alive:
        if state.waiting or state.overdue:
            return "Stopped. No worker is alive."
        return "Idle. No worker is alive, and no task waits."
    if state.overdue:
        late = show_duration(state.oldest_overdue_s)
        return f"Late. {tasks_are(state.overdue)} overdue, the oldest by {late}."
    flaw = _flaw(state) or ("a peak ahead will start late" if is_peak_ahead else None)
    return f"On time, but {flaw}." if flaw else "On time."


def _flaw(state: DeploymentState) -> str | None:
    """Return the worst problem that makes no task late, in a few words."""
    if any(group.is_news for group in state.groups):
        about = "about " if state.counts[Status.FAILED].is_estimate else ""
        return f"{about}{count(state.failed, 'task')} failed"
    if retried := sum(runs.runs for _, runs in _retried(state) if _is_much(runs)):
        return f"{runs_have(retried)} failed and will be retried"
    if state.broker_error:
        return "the broker does not answer"
    if silent := sum(not worker.is_alive for worker in state.workers):
        return "1 worker is silent" if silent == 1 else f"{silent:,} workers are silent"
    if limited := sum(policy.held or 0 for policy in _limited(state)):
        return f"{count(limited, 'task')} {'waits' if limited == 1 else 'wait'} for a limit"
    return None


def _stopped(state: DeploymentState) -> Iterator[Problem]:
    numbers = {"waiting": state.waiting, "running": state.running}
    tasks = " and ".join(
        f"{tasks_are(number)} {word}" for word, number in numbers.items() if number
    )
    if tasks and not state.alive:
        yield Problem("bad", f"No worker is alive, and {tasks}. Start a worker.", "workers")


def _late(state: DeploymentState) -> Iterator[Problem]:
    for late in state.late:
        if not state.alive and late.reason.code == "no_worker":
            continue  # the problem of all workers explains it
        age, verb = show_duration(late.late_s), "is" if late.tasks == 1 else "are"
        text = f"{count(late.tasks, 'task')} of {late.tag} {verb} overdue by up to {age}. "
        level: Severity = "warning" if late.reason.code in ("paused", "limit") else "bad"
        where = {"tag": late.tag, "status": "NOT_COMPLETE"}
        yield Problem(level, text + late.reason.text, "tasks", where)


def _late_starts(state: DeploymentState) -> Iterator[Problem]:
    """Return a note, since these tasks have run."""
    if state.late_starts:
        most = sorted(state.late_starts.items(), key=lambda each: -each[1])
        reasons = "; ".join(f"{number:,} because {LATE_BECAUSE[why]}" for why, number in most)
        number, minutes = sum(state.late_starts.values()), LATE_RANGE.total_seconds() / 60
        text = f"{count(number, 'run')} of the last {minutes:g} minutes began late: {reasons}."
        yield Problem("note", text, "tags")


def _services(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    broker_error, down_s = state.broker_error, broker_down_s(state.workers)
    if state.problem == NO_STANDBY:
        text = f"The database may lose or delay commits: {NO_STANDBY}."
        yield Problem("warning", text)
    if broker_error:
        since = "" if down_s is None else since_text(down_s, state.now, zone)
        fact = f"has not answered {since}" if since else "does not answer"
        late = "workers read the table, so tasks start a few seconds late"
        text = f"The broker {fact}; {late}: {broker_error}"
        yield Problem("warning", text, "workers")
    if state.alive and any(sweep.is_late for sweep in state.sweeps):
        yield Problem("warning", "No sweep has run lately. Do beat and a worker run?")
        return
    age_s = state.beat_age_s
    if age_s is not None and age_s > LEAST_OUTAGE_S and not broker_error:
        text = (
            f"No message of beat has arrived {since_text(age_s, state.now, zone)}. The workers "
            "sweep by themselves, less often. Is celery beat running?"
        )
        yield Problem("warning", text)


_RESTART = "run again elsewhere, at the latest when their leases end."


def _workers(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for worker in state.workers:
        services, name = worker.services, worker.name
        if not worker.is_alive:
            text = f"The worker {name} is silent. If it is lost, its tasks {_RESTART}"
            yield Problem("warning", text, "workers")
            continue
        if abs(worker.clock_offset_s) > CLOCK_S:
            offset = show_duration(worker.clock_offset_s)
            text = f"The clock of {name} is off by {offset}. Tasks are still on time."
            yield Problem("warning", text, "workers")
        broker_s, timer_s = services.broker_down_s, services.timer_down_s
        for service, down_s in (("its broker", broker_s), ("the server of its timer", timer_s)):
            # If the broker is down for everyone, that is one problem.
            if down_s is not None and down_s > LEAST_OUTAGE_S and not state.broker_error:
                since = since_text(down_s, state.now, zone)
                text = (
                    f"The worker {name} has not reached {service} {since}. It finds due tasks in "
                    "the table, so they start some seconds late."
                )
                yield Problem("warning", text, "workers")


def _lost(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    """Return a note: the others do the work of a lost worker, and if that is too much, other
    problems say so."""
    if not state.lost:
        return
    number, names = len(state.lost), [worker.name for worker in state.lost]
    at = clock_time(state.lost[0].lost_at, state.now, zone)
    text = f"Worker {names[0]} was lost at {at}"
    if number > 1:
        some = some_values(names, NAMED_WORKERS)
        text = f"{count(number, 'worker')} were lost, the last one at {at}: {some}"
    text += f". A lost worker was killed, or its host is down. Its tasks {_RESTART}"
    yield Problem("note", text, "workers")


def _limited(state: DeploymentState) -> list[Policy]:
    """Return the policies whose limit holds tasks back."""
    return [each for each in state.policies if each.has_limits and each.held and not each.is_paused]


def _held_back(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in _limited(state):
        limits = {
            "concurrency": policy.concurrency,
            "of each key": policy.concurrency_per_key,
            "rate": policy.rate_text,
        }
        shown = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
        verb, oldest = ("waits", "") if policy.held == 1 else ("wait", ", the oldest")
        text = f"{count(policy.held or 0, 'task')} of {policy.name} {verb} for its limit ({shown})"
        if policy.held_since is not None and policy.held_since < state.now:
            waited_s = (state.now - policy.held_since).total_seconds()
            text += f"{oldest} {since_text(waited_s, state.now, zone)}"
        yield Problem("warning", f"{text}.", "policies")


def _paused(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in state.paused:
        held = f", {policy.held:,} held" if policy.held else ""
        by = f" by {policy.updated_by}" if policy.updated_by else ""
        end = policy.paused_until
        until = "" if end is None else f" until {clock_time(end, state.now, zone)}"
        text = f"The {policy.kind} {policy.name} is paused{by}{until}{held}."
        yield Problem("warning", text, "policies")


# -- The checks of a probe ------------------------------------------------------------------------


#: Queues without a worker that a check looks at: each costs some queries.
MOST_OTHER_QUEUES = 20


class HealthCheck(NamedTuple):
    """The result of one check, with its facts in a sentence."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True)
class HealthChecks:
    """Checks some processes of a deployment.

    Attributes
    ----------
    runtime
        The deployment.
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
    timeout_s
        The time that the database has to answer.
    """

    runtime: Runtime
    component: str = "deployment"
    host: str = ""
    name: str | None = None
    max_overdue: int | None = None
    timeout_s: float = 5.0

    @property
    def sweep_limit_s(self) -> float:
        """The time after which a worker would have swept by itself, and one interval more."""
        return self.runtime.settings.self_sweep_s + self.runtime.settings.sweep_s

    def live(self) -> list[HealthCheck]:
        """Return a check that fails only if a restart of the process would help.

        Without the database, or while it is read-only, it is unknown whether the process works.
        A restart would not change that, so the check succeeds then.
        """
        name = "beat" if self.component == "beat" else "worker"
        try:
            return self._in_time(self._live)
        except DelayTaskError:
            return [HealthCheck(name, True, "unknown, because the database does not answer")]

    def ready(self) -> list[HealthCheck]:
        """Return the checks that all succeed if tasks can run on time."""
        try:
            found = self._in_time(self._ready)
        except DelayTaskError as error:
            found = [HealthCheck("database", False, str(error))]
        if self.runtime.settings.uses_broker and self.component not in ("api", "run"):
            problem = ask_broker(self.runtime)
            found.append(HealthCheck("broker", problem is None, problem or "answers"))
        return found

    def _in_time(self, checks: Callable[[datetime], Iterator[HealthCheck]]) -> list[HealthCheck]:
        """Return the checks; raise a `DelayTaskError` if the database answers too late."""
        try:
            return within(self.timeout_s, lambda: list(checks(self.runtime.store.tasks.now())))
        except TimeoutError:
            late = f"no answer within {show_duration(self.timeout_s)}"
            raise StoreUnavailableError(late) from None

    def _live(self, now: datetime) -> Iterator[HealthCheck]:
        check = self._process_check(now, self._workers(now))
        if not check.is_ok and server_problem(self.runtime.store.database) == READ_ONLY:
            text = "unknown, because the database is read-only"  # nobody can report
            check = HealthCheck(check.name, True, text)
        yield check

    def _ready(self, now: datetime) -> Iterator[HealthCheck]:
        store, settings, most = self.runtime.store, self.runtime.settings, self.max_overdue
        is_ok = server_problem(store.database) != READ_ONLY
        yield HealthCheck("database", is_ok, "answers" if is_ok else READ_ONLY)
        yield self._revision_check()
        if self.component == "api":  # a producer's role may not read the other tables
            return
        workers = self._workers(now)
        yield self._process_check(now, workers)
        if self.component == "deployment":
            yield self._queues_check(workers)
        if self.component != "beat":
            yield self._sweep_check(now)
        if most is not None:
            # More than one beyond the limit need not be counted.
            tasks, _ = count_overdue(store, settings.grace_s, most + 1)
            found = f"{tasks:,}" if tasks <= most else f"more than {most:,}"
            yield HealthCheck("overdue", tasks <= most, f"{found} overdue, at most {most:,}")

    def _workers(self, now: datetime) -> Sequence[RegisteredWorker]:
        return self.runtime.store.workers.registered(now, self.runtime.settings.silent_s)

    def _revision_check(self) -> HealthCheck:
        """Compare the tables with this version, which also works with tables of a newer one.

        Migrations store the revision, also those of Django. `testing.create_tables` stores none.
        """
        store, settings = self.runtime.store, self.runtime.settings
        database, names = store.database, (settings.name_prefix, settings.table_schema or None)
        found, head = migrations.current(database, *names), migrations.head()
        if found is None and not migrations.has_tables(database, store.schema):
            return HealthCheck("tables", False, f"they are missing; {database.tables_remedy}")
        detail = f"revision {found or 'unknown'}, this version has {head}"
        if found is None or found >= head:
            return HealthCheck("tables", True, detail)
        return HealthCheck("tables", False, f"{detail}; {database.tables_remedy}")

    def _process_check(self, now: datetime, workers: Sequence[RegisteredWorker]) -> HealthCheck:
        """Check that beat or a worker lives. On one host, all that are registered have to live."""
        if self.component == "beat":
            return self._beat_check(workers)
        asked = [worker for worker in workers if self._is_about(worker)]
        silent = [worker for worker in asked if not worker.is_alive]
        alive = [worker for worker in asked if worker.is_alive]
        lost = _lost_text(list(filter(self._is_about, self.runtime.store.workers.lost())), now)
        if not asked:
            place = f" on {self.host}" if self.name is None else f" with the name {self.name}"
            place = "" if self.component == "deployment" else place
            return HealthCheck("worker", False, f"none is registered{place}{lost}")
        if not alive or (silent and self.component != "deployment"):
            last = min(silent, key=lambda worker: worker.name)
            text = f"{last.name} has not reported for {show_duration(last.age_s)}"
            return HealthCheck("worker", False, text + lost)
        newest = min(alive, key=lambda worker: worker.age_s)
        more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        text = f"{newest.name} ({show_duration(newest.age_s)} ago){more}{lost}"
        return HealthCheck("worker", True, text)

    def _is_about(self, worker: RegisteredWorker | LostWorker) -> bool:
        if self.component == "deployment":
            return True
        is_drain = worker.pool.startswith(POLLING_PREFIX)
        if is_drain != (self.component == "run"):
            return False
        return worker.name == self.name or (
            self.name is None and worker.name.rpartition("@")[2] == self.host
        )

    def _beat_check(self, workers: Sequence[RegisteredWorker]) -> HealthCheck:
        """Check that messages of beat arrive, as far as live workers with a broker know."""
        age_s = beat_age_s(workers)
        if age_s is None:
            return HealthCheck("beat", True, "unknown, because no worker receives its messages")
        limit = show_duration(self.sweep_limit_s)
        detail = f"last message {show_duration(age_s)} ago, at most {limit}"
        return HealthCheck("beat", age_s <= self.sweep_limit_s, detail)

    def _queues_check(self, workers: Sequence[RegisteredWorker]) -> HealthCheck:
        """Look for queues with late tasks and no live worker. A paused queue needs none."""
        store, served = (
            self.runtime.store,
            {q for each in workers if each.is_alive for q in each.queues},
        )
        queues: Sequence[str] = ()
        if served and ALL_QUEUES not in served:
            policies = store.policies.read()
            served |= {each.name for each in policies if each.kind == "queue" and each.is_paused}
            names, _ = store.sweeps.next_queues(QueuePlace(), MOST_OTHER_QUEUES + len(served))
            others = sorted(names - served)[:MOST_OTHER_QUEUES]
            late = store.sweeps.levels(self.sweep_limit_s, others)
            queues = sorted({level.queue for level in late})
        if not queues:
            return HealthCheck("queues", True, "each queue with late tasks has a worker")
        text = f"no live worker serves {some_values(queues)}, where tasks are late"
        return HealthCheck("queues", False, text)

    def _sweep_check(self, now: datetime) -> HealthCheck:
        limit_s, partitions = self.sweep_limit_s, self.runtime.settings.sweep_partitions
        sweeps = self.runtime.store.sweeps.last(partitions, limit_s, now)
        ages = [sweep.age_s for sweep in sweeps if sweep.age_s is not None]
        if len(ages) < len(sweeps):
            return HealthCheck("sweep", False, "there was no sweep yet")
        detail = f"{show_duration(max(ages))} ago, at most {show_duration(limit_s)}"
        return HealthCheck("sweep", not any(sweep.is_late for sweep in sweeps), detail)


def _lost_text(lost: Sequence[LostWorker], now: datetime) -> str:
    """Return a clause about the lost workers, which does not change the result of the check."""
    if not lost:
        return ""
    ago = show_duration((now - lost[0].lost_at).total_seconds())
    more = f" (and {len(lost) - 1} more within the hour)" if len(lost) > 1 else ""
    return f"; {lost[0].name} was lost {ago} ago{more}"
