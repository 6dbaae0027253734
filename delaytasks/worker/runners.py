"""Builds what runs tasks in one process from the parts of a `DelayTasks` instance."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING

from delaytasks.execution.admission import Admission
from delaytasks.execution.runner import Runner
from delaytasks.worker.celery_context import CeleryTaskContext
from delaytasks.worker.task_events import TaskEvents

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.processors.thread_slots import ThreadSlots


def build_task_events(delays: DelayTasks, hostname: str) -> TaskEvents:
    """Return what sends Celery events for the tasks of this process."""
    settings = delays.settings
    shows_bodies = settings.event_bodies and not settings.encryption_keys
    return TaskEvents(delays.celery, hostname, settings.publish_limit_s, shows_bodies)


def build_runner(delays: DelayTasks, number: int, thread_slots: ThreadSlots) -> Runner:
    """Return what runs the chunks of a shard in this process."""
    settings, events, processes = delays.settings, delays.events, delays.processes
    shard = delays.shards[number]
    claims = shard.store.claims(
        processes.name(os.getpid()),
        own_address(shard.store.database.url.host),
        lambda: shard.policies.current().limited,
    )
    task_context = CeleryTaskContext(
        delays.celery, processes.hostname, shard.clock, delays.around, processes.keeps_time_limits
    )
    return Runner(
        settings,
        claims,
        shard.clock,
        delays.registry,
        delays.inline_timer,
        events,
        task_context,
        delays.transaction_for,
        Admission(shard.policies, shard.store.holding, events),
        # A process that runs tasks without a worker runs them without limits.
        keeps_time_limits=processes.keeps_time_limits or not processes.is_worker,
        thread_slots=thread_slots,
        renewed_at=partial(processes.renewals.last, number),
        # The main process of a worker renews the leases of rows that run longer than their chunk.
        may_leave=processes.is_worker and processes.leaves_rows,
        kept=task_context.kept,
    )


def own_address(toward: str | None) -> int | None:
    """Return this host's IPv4 address as the database sees it, as a number; None with IPv6 only."""
    try:
        # A connected datagram socket sends nothing. It only finds the route of the packets.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((toward or "127.0.0.1", 9))
            return int.from_bytes(socket.inet_aton(probe.getsockname()[0]), "big")
    except OSError:
        return None
