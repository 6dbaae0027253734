"""The database roles of docs/security.md: with the documented statements, each role can do its work
and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from delaytasks import ConfigError, DelayTasks
from delaytasks.db import migrations
from delaytasks.db.store import Store
from delaytasks.model.task import Entry
from delaytasks.operate.checks import check_ready, check_waiting
from delaytasks.operate.health import HealthChecks
from delaytasks.operate.state import find_overdue, server_problem
from delaytasks.recurring.recurring import follow
from delaytasks.runtime import runtime_of
from tests.conftest import closing_all, settings_for
from tests.running import ROOT
from tests.services import own_database
from tests.world.recording import delays_on, explain, record, runner_of

pytestmark = pytest.mark.slow

ROLES = ("migrator", "web", "worker", "console", "operator")


def documented() -> list[tuple[str, str, str]]:
    """Return (privileges, tables, role) of each GRANT in the docs."""
    page = (ROOT / "docs/security.md").read_text()
    block = page.partition("## Database roles")[2].partition("```sql\n")[2].partition("```")[0]
    block = re.sub(r"--.*", "", block)
    found = re.findall(r"GRANT\s+(.+?)\s+ON\s+(.+?)\s+TO\s+shop_(\w+);", block, re.DOTALL)
    assert {role for *_, role in found} == set(ROLES)
    return [(privileges, " ".join(tables.split()), role) for privileges, tables, role in found]


@dataclass
class RoleTables:
    url: str
    names: dict[str, str]
    admin: Callable[..., None]

    def url_of(self, role: str) -> str:
        own = make_url(self.url).set(username=self.names[role], password="secret")
        return own.render_as_string(hide_password=False)

    def delays(self, role: str, horizon: str = "30s") -> DelayTasks:
        made = delays_on(self.url_of(role), sweep=0.001, purge_after=1, horizon=horizon)
        record(made)
        return made


@pytest.fixture(scope="module", params=["postgresql", "mysql"])
def role_tables(request: pytest.FixtureRequest) -> Iterator[RoleTables]:
    shared: str = request.getfixturevalue(f"{request.param}_url")
    url, drop = own_database(shared, f"_roles{secrets.token_hex(2)}")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    mark = f"{os.getpid()}_{secrets.token_hex(2)}"
    names = {role: f"dt_{role}_{mark}" for role in ROLES}
    is_pg = request.param == "postgresql"
    accounts = [names[role] if is_pg else f"'{names[role]}'@'%'" for role in ROLES]

    def admin(*statements: str) -> None:
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement.replace("%", "%%"))

    made = RoleTables(url, names, admin)
    try:
        for account in accounts:
            kind, how = ("ROLE", "LOGIN") if is_pg else ("USER", "IDENTIFIED BY 'secret'")
            admin(f"CREATE {kind} {account} {how}")
        grants = documented()
        grant(made, is_pg, [one for one in grants if one[2] == "migrator"])
        if not is_pg:
            admin(f"GRANT ALL ON {make_url(url).database}.* TO {accounts[0]}")
        migrator = Store(made.url_of("migrator"), settings_for(made.url_of("migrator")))
        migrations.upgrade(migrator.database)
        migrator.close()
        # An operator is a console with additional privileges.
        grants += [(p, t, "operator") for p, t, role in grants if role in ("console", "web")]
        grant(made, is_pg, [one for one in grants if one[2] != "migrator"])
        yield made
    finally:
        for account in accounts:
            ends = ("OWNED BY", "ROLE") if is_pg else ("USER",)
            admin(*(f"DROP {end} {account}" for end in ends))
        engine.dispose()
        drop()


def grant(role_tables: RoleTables, is_pg: bool, grants: Sequence[tuple[str, str, str]]) -> None:
    database = make_url(role_tables.url).database
    for privileges, tables, role in grants:
        if is_pg:
            role_tables.admin(f"GRANT {privileges} ON {tables} TO {role_tables.names[role]}")
        elif not tables.startswith("SCHEMA"):
            account = f"'{role_tables.names[role]}'@'%'"
            for table in tables.split(", "):
                role_tables.admin(f"GRANT {privileges} ON {database}.{table} TO {account}")


As = Callable[..., DelayTasks]


@pytest.fixture
def as_role(role_tables: RoleTables) -> Iterator[As]:
    with closing_all(role_tables.delays) as make:
        yield make


def test_a_producer_schedules_moves_and_checks_tasks(role_tables: RoleTables, as_role: As) -> None:
    delays = as_role("web")
    task = delays.schedule_delay("mail", {"n": 1}, 60, key="k")
    delays.schedule_many([("mail", {}, 60)] * 3)
    delays.schedule_delay("mail", {"n": 2}, 60, key="k", on_conflict="replace")
    delays.reschedule(task, 90)
    delays.touch(task, 100)
    delays.touch([task], 110)
    assert delays.cancel(task)
    delays.rerun(task, 60)
    assert len(delays.find(tag="mail")) == 4
    assert delays.get(task, attempts=True).attempts == ()
    assert all(check.is_ok for check in HealthChecks(runtime_of(delays), "api").ready())
    assert server_problem(runtime_of(delays).store.database) is None  # `check` asks it


def test_a_worker_runs_sweeps_and_purges(role_tables: RoleTables, as_role: As) -> None:
    web, delays = as_role("web", horizon="5s"), as_role("worker")
    check_ready(runtime_of(delays))
    ran: list[Any] = []

    @delays.processor("good", keep_result=True)
    def run(body: Any) -> None:
        ran.append(body)
        delays.policies.pause(tag="partner", until="1h")

    delays.processor("bad", retries="1h")(lambda body: 1 / 0)
    operator = as_role("operator")
    operator.policies.set(tag="good", concurrency=2)
    operator.policies.pause(tag="bad")
    operator.policies.resume(tag="bad")
    tags = ["good", "bad", "nobody"] * 3
    tasks = [web.schedule_delay(tag, {}, 0, key=f"{tag}{n}") for n, tag in enumerate(tags)]
    web.recurring.set("each hour", "good", every="1h")
    web.recurring.set("soon", "good", every="20s")
    operator.recurring.pause("each hour")
    delays.recurring(every="20s", body={})(delays.processor("declared")(lambda body: None))
    follow(runtime_of(delays))
    store = runtime_of(delays).store
    store.workers.report("w1", ["default"], "prefork", 1, 0)
    counts = delays.events.counts
    runtime_of(delays).policy_cache.refresh()
    runner_of(delays).run([Entry(task.id, 0, 0) for task in tasks])
    for _ in range(3):
        assert runtime_of(delays).sweeper.sweep(0)
        runner_of(delays).run_due("default", [0], 50)
    store.leases.renew(["w1/1"], runtime_of(delays).clock.now())
    store.leases.recover_dead(["w1/1"], 5)
    store.workers.expire(0)
    store.sweeps.forget_armed()
    assert counts["recurring.created"] >= 6
    assert len(ran) == 3
    assert delays.policies.list(tag="partner")[0].is_paused
    assert not counts["loop.failed"] + counts["chunk.failed"], counts

    # Without this right, no run would be cancelled.
    table, name = "yb_delay_cancel_request", role_tables.names["worker"]
    of = f"{make_url(role_tables.url).database}.{table} FROM '{name}'@'%'"
    if role_tables.url.startswith("postgresql"):
        of = f"{table} FROM {name}"
    role_tables.admin(f"REVOKE SELECT ON {of}")
    with pytest.raises(ConfigError, match=rf"(?s){table} cannot be read.*denied.*{table}"):
        check_ready(runtime_of(delays))
    role_tables.admin(f"GRANT SELECT ON {of.replace(' FROM ', ' TO ')}")


def test_a_console_reads_and_an_operator_pauses_and_moves_many(as_role: As) -> None:
    web, delays = as_role("web"), as_role("console")
    store = runtime_of(delays).store
    task = web.schedule_delay("mail", {}, 60)
    web.schedule_many([("many", {}, 60)] * 3)
    assert explain(delays, task)[0].code == "future"
    assert find_overdue(store, 3600).tasks == 0, "an earlier test may have left due tasks"
    assert server_problem(store.database) is None
    for reads in (delays.find, delays.policies.list, store.workers.all):
        reads()
    list(check_waiting(runtime_of(delays)))
    operator = as_role("operator")
    assert operator.bulk.cancel(tag="many").changed == 3
    assert operator.bulk.rerun(tag="many", status="CANCELLED").changed == 3
    operator.policies.pause(queue="slow")
    operator.policies.resume(queue="slow")


#: What a role must not do, since another one does it.
FORBIDDEN = {
    "web": ["SELECT 1 FROM yb_delay_worker", "SELECT 1 FROM yb_delay_policy"],
    "worker": ["DELETE FROM yb_delay_sweep", "INSERT INTO yb_delay_audit (actor) VALUES ('x')"],
    "console": ["DELETE FROM yb_delay_worker", "DELETE FROM yb_delay_policy"],
    "operator": ["DELETE FROM yb_delay_worker", "DELETE FROM yb_delay_audit"],
}
FORBIDDEN["web"] += ["SELECT 1 FROM yb_delay_audit", "DELETE FROM yb_delay_task_message"]
FORBIDDEN["console"] += ["INSERT INTO yb_delay_task_message (tag, message_body) VALUES ('x', '1')"]
FORBIDDEN["console"] += ["INSERT INTO yb_delay_audit (actor) VALUES ('x')"]
FORBIDDEN["operator"] += ["DELETE FROM yb_delay_task_message"]
OF_MIGRATOR = ["DROP TABLE yb_delay_waitlist", "CREATE TABLE made_without_privilege (x INTEGER)"]
OF_MIGRATOR += ["ALTER TABLE yb_delay_waitlist ADD COLUMN x INTEGER"]


@pytest.mark.parametrize("role", FORBIDDEN)
def test_no_role_may_do_the_work_of_another_one(role_tables: RoleTables, role: str) -> None:
    engine = create_engine(role_tables.url_of(role))
    for statement in FORBIDDEN[role] + OF_MIGRATOR:
        denied = pytest.raises(DBAPIError, match=r"denied|must be owner")
        with engine.connect() as connection, denied:
            connection.execute(text(statement))
    engine.dispose()
