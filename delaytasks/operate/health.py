"""Judges a deployment: the verdict in words, and the checks of `status --probe`.

The console, `delaytasks status` and `status --watch` show the verdict about a snapshot of the
state. The checks read less, because a probe has little time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from delaytasks.db import migrations
from delaytasks.db.sweep_queries import RegisteredWorker
from delaytasks.loops import within
from delaytasks.model.clock import UTC
from delaytasks.model.errors import DelayTaskError, StoreUnavailableError
from delaytasks.model.inputs import POLLING_PREFIX, show_duration
from delaytasks.model.moves import late_start
from delaytasks.model.text import count, some_values
from delaytasks.operate.state import (
    NO_STANDBY,
    READ_ONLY,
    DeploymentState,
    ask_broker,
    explained,
    find_overdue,
    server_problem,
)
from delaytasks.operate.statistics import LATE_RANGE
from delaytasks.operate.why import LATE_BECAUSE, Facts, broker_down, limits_of, pause_of

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
    #: The problem in a few words, for the headline if no task is late.
    flaw: str = ""


def clock_time(at: datetime, now: datetime, zone: tzinfo) -> str:
    """Return a time of day, with the date unless it is today."""
    local = at.astimezone(zone)
    is_today = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M %Z}" if is_today else f"{local:%b %d, %H:%M %Z}"


def since_text(seconds: float, now: datetime, zone: tzinfo) -> str:
    """Return when something began, for example "since 14:02 UTC (3m)"."""
    at = clock_time(now - timedelta(seconds=seconds), now, zone)
    return f"since {at} ({show_duration(seconds)})"


def counted(number: int, verbs: str, noun: str = "task", tag: str = "") -> str:
    """Return, for example, "1 task is" or "12 tasks of mail.send are" for the verbs "is are"."""
    of = f" of {tag}" if tag else ""
    return f"{count(number, noun)}{of} {verbs.split()[number != 1]}"


LATE_MINUTES = LATE_RANGE.total_seconds() / 60

# -- Judges the failures of a deployment ----------------------------------------------------------


#: Failed tasks that are older are no news.
RECENT = timedelta(hours=1)
#: Failed runs that are retried are a warning if they are more, and a note otherwise. The alert
#: `DelayTasksFailing` has the same limits for tasks.
FEW_RUNS, SMALL_SHARE = 5, 0.05


def _failures(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    news = [group for group in state.groups if state.now - group.last_at <= RECENT]
    all_failed = state.rows["FAILED"]
    for group in news:
        least = "" if state.has_all_failures else "At least "
        have = counted(group.runs, "has have", tag=group.tag)
        text = f"{least}{have} failed since {clock_time(group.first_at, state.now, zone)}"
        where = {"status": "FAILED", **group.filters}
        flaw = f"{count(all_failed, 'task')} failed"
        yield Problem("bad", f"{text}: {group.summary}", "tasks", where, flaw)
    yield from _retried(state)
    others = all_failed - sum(group.runs for group in news)
    if others and (state.has_all_failures or not news):
        text = f"{count(others, 'task')} failed more than an hour ago."
        yield Problem("note", text, "failures")


def _retried(state: DeploymentState) -> Iterator[Problem]:
    """Name the tags whose last runs failed and will be retried, with the last error of each."""
    last = {group.tag: group for group in reversed(state.retried)}
    for tag, runs in sorted(state.runs.items(), key=lambda each: -each[1].retried):
        if runs.retried and tag in last:
            have = counted(runs.retried, "has have", "run", tag)
            text = f"{have} failed in the last {LATE_MINUTES:g} minutes, and will be retried: "
            is_much = runs.retried > max(FEW_RUNS, SMALL_SHARE * runs.started)
            flaw = f"runs of {tag} fail and are retried" if is_much else ""
            level: Severity = "warning" if is_much else "note"
            yield Problem(level, text + last[tag].summary, "failures", flaw=flaw)


# -- Judges a deployment --------------------------------------------------------------------------


#: Problems that are named.
MOST_PROBLEMS = 6
#: Lost workers that are named.
NAMED_WORKERS = 3
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


def verdict_of(state: DeploymentState, zone: tzinfo = UTC) -> Verdict:
    """Judge a state. Times of day are in `zone`."""
    if state.problem == READ_ONLY:
        text = f"The database answers, but {READ_ONLY}."
        return Verdict("bad", "Stopped. The database is read-only.", [Problem("bad", text)])
    problems = [*_stopped(state), *_late(state)]
    for judge in (_failures, _services, _workers, _limited, _paused, _lost):
        problems += judge(state, zone)
    problems += _late_starts(state)
    worst_first = sorted(problems, key=lambda each: -SEVERITIES.index(each.level))
    level = worst_first[0].level if worst_first else "good"
    flaw = next((each.flaw for each in worst_first if each.flaw), "")
    return Verdict(level, _headline(state, flaw), worst_first[:MOST_PROBLEMS])


def _headline(state: DeploymentState, flaw: str) -> str:
    if not state.alive:
        if state.rows["NOT_COMPLETE"] or state.overdue:
            return "Stopped. No worker is alive."
        return "Idle. No worker is alive, and no task waits."
    if state.overdue:
        late = show_duration(state.oldest_overdue_s)
        return f"Late. {counted(state.overdue, 'is are')} overdue, the oldest by {late}."
    return f"On time, but {flaw}." if flaw else "On time."


def _stopped(state: DeploymentState) -> Iterator[Problem]:
    numbers = {"waiting": state.rows["NOT_COMPLETE"], "running": state.rows["RUNNING"]}
    tasks = [f"{counted(number, 'is are')} {word}" for word, number in numbers.items() if number]
    if tasks and not state.alive:
        text = f"No worker is alive, and {' and '.join(tasks)}. Start a worker."
        yield Problem("bad", text, "workers")


def _late(state: DeploymentState) -> Iterator[Problem]:
    for late in state.late:
        if not state.alive and late.reason.code == "no_worker":
            continue  # the problem of all workers explains it
        are, age = counted(late.tasks, "is are", tag=late.tag), show_duration(late.late_s)
        text = f"{are} overdue by up to {age}. "
        level: Severity = "warning" if late.reason.code in ("paused", "limit") else "bad"
        where = {"tag": late.tag, "status": "NOT_COMPLETE"}
        yield Problem(level, text + late.reason.text, "tasks", where)


def _late_starts(state: DeploymentState) -> Iterator[Problem]:
    """Return a note, since these tasks have run."""
    late = Counter[str]()
    for counts in state.runs.values():
        for late_by, number in counts.late_starts.items():
            late[late_start(late_by)[1]] += number
    if late:
        reasons = "; ".join(f"{n:,} because {LATE_BECAUSE[why]}" for why, n in late.most_common())
        runs = f"{count(late.total(), 'run')} of the last {LATE_MINUTES:g} minutes"
        yield Problem("note", f"{runs} began late: {reasons}.", "tags")


def _services(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    if state.problem == NO_STANDBY:
        yield Problem("warning", f"The database may lose or delay commits: {NO_STANDBY}.")
    if state.broker_error:
        text, flaw = broker_down(state.broker_error), "the broker does not answer"
        yield Problem("warning", text, "workers", flaw=flaw)
    if state.alive and any(sweep.is_late for sweep in state.sweeps):
        yield Problem("warning", "No sweep has run lately. Do beat and a worker run?")
        return
    age_s = state.beat_age_s
    if age_s is not None and age_s > LEAST_OUTAGE_S and not state.broker_error:
        text = f"No message of beat has arrived {since_text(age_s, state.now, zone)}."
        effect = "The workers sweep by themselves, less often. Is celery beat running?"
        yield Problem("warning", f"{text} {effect}")


_RESTART = "run again elsewhere, at the latest when their leases end."


def _workers(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    silent = len(state.workers) - len(state.alive)
    flaw = "1 worker is silent" if silent == 1 else f"{silent:,} workers are silent"
    for worker in state.workers:
        services, name = worker.services, worker.name
        if not worker.is_alive:
            text = f"The worker {name} is silent. If it is lost, its tasks {_RESTART}"
            yield Problem("warning", text, "workers", flaw=flaw)
            continue
        broker_s, timer_s = services.broker_down_s, services.timer_down_s
        for service, down_s in (("its broker", broker_s), ("the server of its timer", timer_s)):
            # If the broker is down for everyone, that is one problem.
            if down_s is not None and down_s > LEAST_OUTAGE_S and not state.broker_error:
                since = since_text(down_s, state.now, zone)
                text = f"The worker {name} has not reached {service} {since}."
                effect = "It finds due tasks in the table, so they start some seconds late."
                yield Problem("warning", f"{text} {effect}", "workers")


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


def _limited(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    """Name the tags whose limit holds tasks back."""
    limited = (each for each in state.policies if each.has_limits and not each.is_paused)
    found = [(policy, policy.held) for policy in limited if policy.held]
    flaw = f"{counted(sum(held for _, held in found), 'waits wait')} for a limit"
    for policy, held in found:
        wait = counted(held, "waits wait", tag=policy.name)
        text = f"{wait} for its limit ({limits_of(policy)})"
        if policy.held_since is not None and policy.held_since < state.now:
            waited_s = (state.now - policy.held_since).total_seconds()
            oldest = ", the oldest" if held > 1 else ""
            text += f"{oldest} {since_text(waited_s, state.now, zone)}"
        yield Problem("warning", f"{text}.", "policies", flaw=flaw)


def _paused(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in state.paused:
        text = pause_of(policy, state.now, partial(clock_time, now=state.now, zone=zone))
        flaw = f"the {policy.kind} {policy.name} is paused"
        yield Problem("warning", text, "policies", flaw=flaw)


# -- The checks of a probe ------------------------------------------------------------------------


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
    timeout_s
        The time that the database has to answer.
    """

    runtime: Runtime
    component: str = "deployment"
    host: str = ""
    name: str | None = None
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

    def _in_time(self, checks: Callable[[Facts], Iterator[HealthCheck]]) -> list[HealthCheck]:
        """Return the checks; raise a `DelayTaskError` if the database answers too late."""
        try:
            return within(self.timeout_s, lambda: list(checks(Facts(self.runtime))))
        except TimeoutError:
            late = f"no answer within {show_duration(self.timeout_s)}"
            raise StoreUnavailableError(late) from None

    def _live(self, facts: Facts) -> Iterator[HealthCheck]:
        check = self._process_check(facts)
        if not check.is_ok and server_problem(facts.store.database) == READ_ONLY:
            text = "unknown, because the database is read-only"  # nobody can report
            check = HealthCheck(check.name, True, text)
        yield check

    def _ready(self, facts: Facts) -> Iterator[HealthCheck]:
        is_ok = server_problem(facts.store.database) != READ_ONLY
        yield HealthCheck("database", is_ok, "answers" if is_ok else READ_ONLY)
        yield self._revision_check()
        if self.component == "api":  # a producer's role may not read the other tables
            return
        yield self._process_check(facts)
        if self.component == "deployment":
            yield self._queues_check(facts)
        if self.component != "beat":
            yield self._sweep_check(facts)

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

    def _process_check(self, facts: Facts) -> HealthCheck:
        """Check that beat or a worker lives. On one host, all that are registered have to live."""
        if self.component == "beat":
            return self._beat_check(facts)
        asked = [worker for worker in facts.workers if self._is_about(worker)]
        if not asked:
            place = f" on {self.host}" if self.name is None else f" with the name {self.name}"
            place = "" if self.component == "deployment" else place
            return HealthCheck("worker", False, f"none is registered{place}")
        alive = [worker for worker in asked if worker.is_alive]
        if not alive or (len(alive) < len(asked) and self.component != "deployment"):
            last = next(worker for worker in asked if not worker.is_alive)
            text = f"{last.name} has not reported for {show_duration(last.age_s)}"
            return HealthCheck("worker", False, text)
        newest = min(alive, key=lambda worker: worker.age_s)
        more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        text = f"{newest.name} ({show_duration(newest.age_s)} ago){more}"
        return HealthCheck("worker", True, text)

    def _is_about(self, worker: RegisteredWorker) -> bool:
        is_drain, host = worker.pool.startswith(POLLING_PREFIX), worker.name.rpartition("@")[2]
        is_there = host == self.host if self.name is None else worker.name == self.name
        is_of_kind = is_drain == (self.component == "run")
        return self.component == "deployment" or (is_there and is_of_kind)

    def _beat_check(self, facts: Facts) -> HealthCheck:
        """Check that messages of beat arrive, as far as live workers with a broker know."""
        age_s = facts.beat_age_s
        if age_s is None:
            return HealthCheck("beat", True, "unknown, because no worker receives its messages")
        limit = show_duration(self.sweep_limit_s)
        detail = f"last message {show_duration(age_s)} ago, at most {limit}"
        return HealthCheck("beat", age_s <= self.sweep_limit_s, detail)

    def _queues_check(self, facts: Facts) -> HealthCheck:
        """Look for queues with late tasks and no live worker. A paused queue needs none."""
        late = explained(facts, find_overdue(facts.store, self.sweep_limit_s))
        queues = {group.queue for group in late if group.reason.code == "no_worker"}
        if not queues:
            return HealthCheck("queues", True, "each queue with late tasks has a worker")
        text = f"no live worker serves {some_values(sorted(queues))}, where tasks are late"
        return HealthCheck("queues", False, text)

    def _sweep_check(self, facts: Facts) -> HealthCheck:
        ages = [sweep.age_s for sweep in facts.sweeps if sweep.age_s is not None]
        if len(ages) < len(facts.sweeps):
            return HealthCheck("sweep", False, "there was no sweep yet")
        limit = show_duration(self.sweep_limit_s)
        detail = f"{show_duration(max(ages))} ago, at most {limit}"
        return HealthCheck("sweep", max(ages) <= self.sweep_limit_s, detail)
