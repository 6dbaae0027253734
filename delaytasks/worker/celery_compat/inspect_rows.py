"""Shows rows in the answers to `celery inspect active`, `scheduled` and `registered`, after Celery's own tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker.control import Panel

from delaytasks.core.bounded_calls import within
from delaytasks.core.clock import from_us
from delaytasks.core.interfaces import by_shard

if TYPE_CHECKING:
    from delaytasks.worker.runtime import WorkerRuntime

logger = get_logger(__name__)
#: Rows in one answer.
MOST_ROWS = 100
#: The longest time to wait for the database: `celery inspect` waits one second by default, and the worker's main thread
#: waits too.
LIMIT_S = 0.5


def show_rows() -> None:
    """Add rows to Celery's commands, once per process. Workers without delayed tasks answer as before."""
    for name, show in (("active", running), ("scheduled", held), ("registered", tags)):
        for command in (
            name,
            {"active": "dump_active", "scheduled": "dump_schedule", "registered": "dump_tasks"}[
                name
            ],
        ):
            celerys_own = Panel.data.get(command)
            if celerys_own is not None and not isinstance(celerys_own, _Shown):
                Panel.data[command] = _Shown(celerys_own, show)


class _Shown:
    def __init__(
        self, celerys_own: Callable[..., Any], show: Callable[[WorkerRuntime], list[Any]]
    ) -> None:
        self._celerys_own = celerys_own
        self._show = show
        self.__doc__ = celerys_own.__doc__

    def __call__(self, state: Any, **options: Any) -> Any:
        answer = self._celerys_own(state, **options)
        runtime = getattr(getattr(state.consumer, "controller", None), "delays_runtime", None)
        if runtime is None:
            return answer
        return [*answer, *(found for found in self._show(runtime) if found not in answer)]


def running(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return the rows that this worker's processes have claimed and not settled yet."""
    if not runtime.dispatcher.is_at_work:
        return []
    workers = [runtime.processes.name(pid) for pid in runtime.pids()]
    found: list[dict[str, Any]] = []
    for shard in runtime.shards:
        read = partial(shard.store.inspection.running, workers, MOST_ROWS - len(found))
        found += [_request(runtime, row, row.worker) for row in _read(read) or ()]
    return found


def held(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return what the wheel holds, in the order of due times."""
    entries = runtime.near_entries.wheel.soonest(MOST_ROWS)
    rows: dict[int, Any] = {}
    for shard, some in by_shard(entries, len(runtime.shards)).items():
        read = partial(runtime.shards[shard].store.inspection.named, [entry.id for entry in some])
        rows |= _read(read) or {}
    return [
        {
            "eta": from_us(entry.due_us).isoformat(),
            "priority": entry.priority,
            "request": _request(runtime, rows[entry.id])
            if entry.id in rows
            else {"id": str(entry.id), "name": None},
        }
        for entry in entries
    ]


def tags(runtime: WorkerRuntime) -> list[str]:
    """Return the tags that have a processor here."""
    return sorted(processor.tag for processor in runtime.registry)


def _request(runtime: WorkerRuntime, row: Any, worker: str | None = None) -> dict[str, Any]:
    """Return what Celery says about a request. The body is not shown: `delaytasks show` has it."""
    pid = (worker or "").rpartition("/")[2].partition("-")[0]
    return {
        "id": str(row.id),
        "name": row.tag,
        "args": [],
        "kwargs": {"attempt": row.attempts},
        "type": row.tag,
        "hostname": runtime.processes.hostname,
        "time_start": row.update_time.timestamp() if worker else None,
        "acknowledged": True,
        "delivery_info": {
            "exchange": "",
            "routing_key": row.queue,
            "priority": row.priority,
            "redelivered": None,
        },
        "worker_pid": int(pid) if pid.isdigit() else None,
    }


def _read(read: Callable[[], Any]) -> Any:
    """Return what the database answers; None if it does not answer in time."""
    try:
        return within(LIMIT_S, read)
    except Exception:  # whoever asks gets what this process knows by itself
        logger.warning("delaytasks: an inspection had no answer from the database", exc_info=True)
        return None
