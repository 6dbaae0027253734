"""The shop's celeryconfig.

The intervals are shorter than the defaults, so that recovery takes seconds.
"""

from __future__ import annotations

imports = ["examples.demo.shop"]
broker_connection_retry_on_startup = True
task_ignore_result = True

delaytasks_horizon = 10
delaytasks_sweep = 1
delaytasks_lease = 3
