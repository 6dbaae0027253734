"""Adds rows to the answers of `celery inspect active`, `scheduled` and `registered`."""

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
#: The rows in one answer.
MAX_INSPECTED_ROWS = 100
#: The time limit for the database. `celery inspect` waits for one second by default, and the
#: worker's main thread waits for the answer too.
INSPECT_LIMIT_S = 0.5


def show_rows() -> None:
    """Replace Celery's commands, once per process. Other apps' workers answer as before."""
    commands: dict[str, Callable[[WorkerRuntime], list[Any]]] = {
        "active": active_rows,
        "dump_active": active_rows,
        "scheduled": scheduled_entries,
        "dump_schedule": scheduled_entries,
        "registered": registered_tags,
        "dump_tasks": registered_tags,
    }
    for command, rows_of in commands.items():
        original = Panel.data.get(command)
        if original is not None and not isinstance(original, _WithRows):
            Panel.data[command] = _WithRows(original, rows_of)


class _WithRows:
    """A command whose answer is Celery's own answer, followed by rows."""

    def __init__(
        self, original: Callable[..., Any], rows_of: Callable[[WorkerRuntime], list[Any]]
    ) -> None:
        self._original = original
        self._rows_of = rows_of
        self.__doc__ = original.__doc__

    def __call__(self, state: Any, **options: Any) -> Any:
        answer = self._original(state, **options)
        runtime = getattr(getattr(state.consumer, "controller", None), "delays_runtime", None)
        if runtime is None:
            return answer
        return [*answer, *(found for found in self._rows_of(runtime) if found not in answer)]


def active_rows(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return the rows that this worker's processes have claimed and not settled yet."""
    if not runtime.dispatcher.is_at_work:
        return []
    workers = [runtime.processes.name(pid) for pid in runtime.pids()]
    found: list[dict[str, Any]] = []
    for shard in runtime.shards:
        left = MAX_INSPECTED_ROWS - len(found)
        read = partial(shard.store.inspection.running, workers, left)
        found += [_request(runtime, row, row.worker) for row in _read(read) or ()]
    return found


def scheduled_entries(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return the entries of the timing wheel in the order of their due times."""
    entries = runtime.near_entries.wheel.soonest(MAX_INSPECTED_ROWS)
    rows: dict[int, Any] = {}
    for number, some in by_shard(entries, len(runtime.shards)).items():
        inspection = runtime.shards[number].store.inspection
        rows |= _read(partial(inspection.named, [entry.id for entry in some])) or {}
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


def registered_tags(runtime: WorkerRuntime) -> list[str]:
    """Return the tags that have a processor in this worker."""
    return sorted(processor.tag for processor in runtime.registry)


def _request(runtime: WorkerRuntime, row: Any, worker: str | None = None) -> dict[str, Any]:
    """Return a row in Celery's form of a request. `delaytasks show` prints its body."""
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
    """Return the database's answer, or None if it does not answer in time."""
    try:
        return within(INSPECT_LIMIT_S, read)
    except Exception:  # the answer has the facts that this process knows by itself
        logger.warning("delaytasks: an inspection had no answer from the database", exc_info=True)
        return None
