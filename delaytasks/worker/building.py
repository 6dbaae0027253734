"""Builds the worker runtime from the parts of a `DelayTasks` instance.

Only this function reads the instance's parts. Each object gets what it needs in its constructor.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from delaytasks.worker.calls import CallThread
from delaytasks.worker.dispatcher import Dispatcher
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.near_entries import NearEntries
from delaytasks.worker.policy_loop import policy_loop
from delaytasks.worker.refused_messages import RefusedMessages
from delaytasks.worker.runtime import WorkerRuntime
from delaytasks.worker.sweep_loop import SweepLoop, SweepLoops
from delaytasks.worker.table_poller import TablePoller, TablePollers
from delaytasks.worker.task_events import WorkerLostEvents, wants_task_events
from delaytasks.worker.unfinished_work import WorkSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delaytasks.app import DelayTasks
    from delaytasks.core.interfaces import Entry
    from delaytasks.execution.runner import Report
    from delaytasks.worker.processes import Processes
    from delaytasks.worker.redis_poller import RedisPoller


def build_runtime(
    delays: DelayTasks,
    celery_worker: Any,
    *,
    polls_table: bool = True,
    on_report: Callable[[Report], None] | None = None,
    row_budget: int | None = None,
) -> WorkerRuntime:
    """Return what the main process of `celery_worker` runs.

    With `polls_table` and the timer `direct` it looks for near tasks in the table. The other
    options are those of the dispatcher.
    """
    settings, events, registry = delays.settings, delays.events, delays.registry
    processes, router, shards = delays.processes, delays.routes, delays.shards
    timer, direct_timer, redis_timer = delays.inline_timer, delays.direct_timer, delays.redis_timer
    pool, hub, hostname = celery_worker.pool, celery_worker.hub, celery_worker.hostname
    call_thread: CallThread | None = None
    call_soon = getattr(hub or celery_worker, "call_soon", None)
    if call_soon is None:
        call_thread = CallThread(events)
        call_soon = call_thread.call_soon
    refused_messages = RefusedMessages(events)
    work_sender = WorkSender(settings, timer, router, events)
    redis_poller: RedisPoller | None = None

    def sends_events() -> bool:
        return wants_task_events(getattr(celery_worker, "consumer", None))

    # The dispatcher and these two parts need each other, so they are looked up when they are used.

    def hold(entries: Sequence[Entry]) -> None:
        near_entries.hold(entries)

    def on_capacity() -> None:
        if redis_poller is not None:
            redis_poller.wake_if_waiting()

    dispatcher = Dispatcher(
        settings,
        [shard.clock for shard in shards],
        events,
        pool,
        call_soon=call_soon,
        hold=hold,
        send_back=work_sender.send_back,
        policy_stamp=lambda number: shards[number].policies.stamp,
        sends_events=sends_events,
        on_capacity=on_capacity,
        on_report=on_report,
        row_budget=row_budget,
    )
    near_entries = NearEntries(settings, events, dispatcher, refused_messages)
    lease_keepers = [
        LeaseKeeper(shard, settings, events, processes, registry, dispatcher, pool, hub)
        for shard in shards
    ]
    sweep_loops = SweepLoops(
        [
            SweepLoop(
                shard, settings, events, processes, registry, timer, pool, hostname, polls_table
            )
            for shard in shards
        ]
    )
    table_pollers = None
    if direct_timer is not None and polls_table:
        pollers = [
            TablePoller(
                shard,
                settings,
                events,
                processes,
                delays.queues,
                dispatcher,
                near_entries,
                refused_messages,
                hostname,
            )
            for shard in shards
        ]
        table_pollers = TablePollers(direct_timer, pollers)
    if redis_timer is not None:
        # Imported here, since other deployments need no Redis client.
        from delaytasks.worker.redis_poller import RedisPoller

        redis_poller = RedisPoller(
            redis_timer,
            delays.clock,
            events,
            processes,
            dispatcher,
            near_entries,
            sweep_loops,
            refused_messages,
        )
    for shard in shards:
        shard.sweeper.drain_here = partial(_drain_here, processes, dispatcher, shard.number)
    outages = dispatcher.shard_health.outages
    loops = [near_entries.wheel.loop]
    loops += [keeper.loop for keeper in lease_keepers] + sweep_loops.loops
    loops += [policy_loop(shard, events, outages) for shard in shards]
    for part in (redis_poller, table_pollers):
        loops += part.loops if part is not None else []
    if call_thread is not None:
        loops.append(call_thread.loop)
    return WorkerRuntime(
        celery_worker=celery_worker,
        settings=settings,
        events=events,
        clock=delays.clock,
        router=router,
        registry=registry,
        processes=processes,
        publisher=delays.publisher,
        timer=delays.timer,
        dispatcher=dispatcher,
        near_entries=near_entries,
        sweep_loops=sweep_loops,
        table_pollers=table_pollers,
        redis_poller=redis_poller,
        work_sender=work_sender,
        refused_messages=refused_messages,
        worker_lost_events=WorkerLostEvents(processes.task_events(), sends_events),
        loops=loops,
    )


def _drain_here(
    processes: Processes, dispatcher: Dispatcher, shard: int, queue: str, priorities: Sequence[int]
) -> bool:
    """Drain a queue in this worker; return False if the worker does not serve the queue."""
    is_served = queue in processes.queues
    if is_served:
        dispatcher.drain(queue, priorities, shard)
    return is_served
