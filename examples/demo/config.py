"""The shop's celeryconfig.

The intervals are shorter than the defaults, so that recovery takes seconds.
"""

from __future__ import annotations

imports = ["examples.demo.shop"]
broker_connection_retry_on_startup = True
task_ignore_result = True

delaytasks_horizon_s = 10
delaytasks_sweep_s = 1
delaytasks_self_sweep_s = 2
delaytasks_grace_s = 0.5
delaytasks_lease_s = 3
