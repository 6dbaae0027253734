"""Each tenant has a recurring report at nine o'clock, in the time zone of the tenant."""

from __future__ import annotations

import logging

from celery import Celery

from delaytasks import DelayTasks

logger = logging.getLogger(__name__)
app = Celery("reports")
app.conf.imports = ["examples.tenants.app"]
delays = DelayTasks(app)


@delays.processor("report.send", retries="1m 10m")
def send_report(body: dict[str, str]) -> None:
    logger.info("the report of %s is sent", body["tenant"])


def add_tenant(name: str, tz: str, cron: str = "0 9 * * *") -> None:
    """Call this when a tenant is created or changed; `session=` would make it one transaction.

    The jitter distributes the reports of many tenants over ten minutes. The meta lets operators
    find or cancel the tasks of a tenant: `delaytasks list --meta tenant=acme`.
    """
    delays.recurring.set(
        f"report-{name}",
        "report.send",
        {"tenant": name},
        cron=cron,
        tz=tz,
        jitter="10m",
        meta={"tenant": name},
    )


def remove_tenant(name: str) -> None:
    delays.recurring.remove(f"report-{name}")


def send_now(name: str) -> int:
    """Send a report between two occurrences, and return the id of its task."""
    return delays.recurring.run(f"report-{name}").id
