"""Reads the state of the deployment for the commands that show or judge it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.operations.state import DeploymentState, ServicesState, read_state
from delaytasks.runtime import runtime_of
from delaytasks.statistics.reading import recent_failures
from delaytasks.timers.broker_link import broker_error

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks


def read_deployment(delays: DelayTasks) -> DeploymentState:
    """Read the tables, and ask the broker whether it answers.

    Raises
    ------
    StoreError
        If no database answers.
    """
    wiring, settings = runtime_of(delays), delays.settings
    uses_broker, error = wiring.direct_timer is None, None
    if uses_broker:
        queue = wiring.publisher.queue(settings.default_queue)
        error = broker_error(wiring.celery, queue, settings.publish_limit_s)
    services = ServicesState(settings.timer, uses_broker, error)
    now = wiring.clock.now()
    state = read_state(wiring, recent_failures, services, now)
    if state.database.error is not None:
        raise state.database.error
    return state
