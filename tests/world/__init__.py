"""The world of the tests: one `DelayTasks` on a real database, and a broker and workers to steer.

A test names what happens with verbs, which do not depend on the classes behind them:

    schedule   write a row, by the public API
    claim      take due rows for a worker
    run        claim rows, call their processors, and settle them
    settle     end the run of a claimed row by one of the moves of a run
    renew      keep the leases of a worker
    recover    release the rows whose leases have ended
    sweep      make everything that a sweep makes
    cancel     withdraw a row, by the public API
"""

from collections.abc import Callable

import pytest

from delaytasks.db.claims import UnclaimedRow
from delaytasks.model.body import key_name
from delaytasks.model.clock import from_us, shard_of, to_us
from delaytasks.model.moves import FINISHED, MOVES
from delaytasks.model.policies import Stamp, WaitlistState
from delaytasks.model.task import Claimed, Entry, Level, Recovered, Settlement
from delaytasks.run.calls import LeaseEndsError
from delaytasks.run.runner import FailureReason, Report
from tests.world.broker import WorldBroker
from tests.world.main_process import MainProcess, run_chunk, served_queues
from tests.world.monitor import Monitor
from tests.world.world import NASTY, RUNNING, Worker, World, status_columns

__all__ = ["FINISHED", "MOVES", "NASTY", "NO_POLICIES", "RUNNING", "Claimed", "Entry"]
__all__ += ["FailureReason", "LeaseEndsError", "Level", "MainProcess", "MakeWorld", "Monitor"]
__all__ += ["MonkeyPatch", "Recovered", "Report", "Settlement", "UnclaimedRow"]
__all__ += ["WaitlistState", "Worker", "World", "WorldBroker", "from_us", "key_name", "run_chunk"]
__all__ += ["served_queues", "shard_of", "status_columns", "to_us"]

MakeWorld = Callable[..., World]
MonkeyPatch = pytest.MonkeyPatch
#: What a main process says of policies if there are none.
NO_POLICIES = Stamp()
