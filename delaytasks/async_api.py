"""The asynchronous twins of the module-level functions.

`python -m tests.async_twins` writes this module from `delaytasks/api.py`.
"""

from __future__ import annotations

from delaytasks.api import methods

aapply_async = methods.aapply_async
aattempts = methods.aattempts
aaudit = methods.aaudit
acancel = methods.acancel
acancel_many = methods.acancel_many
aclear_policy = methods.aclear_policy
afind = methods.afind
aget = methods.aget
apause = methods.apause
apolicies = methods.apolicies
arerun = methods.arerun
arerun_many = methods.arerun_many
areschedule = methods.areschedule
areschedule_many = methods.areschedule_many
aresume = methods.aresume
aschedule_at = methods.aschedule_at
aschedule_callback = methods.aschedule_callback
aschedule_delay = methods.aschedule_delay
aschedule_many = methods.aschedule_many
aschedule_message = methods.aschedule_message
aset_policy = methods.aset_policy
atouch = methods.atouch
atouch_many = methods.atouch_many
aundo = methods.aundo
await_ = methods.await_

__all__ = [
    "aapply_async",
    "aattempts",
    "aaudit",
    "acancel",
    "acancel_many",
    "aclear_policy",
    "afind",
    "aget",
    "apause",
    "apolicies",
    "arerun",
    "arerun_many",
    "areschedule",
    "areschedule_many",
    "aresume",
    "aschedule_at",
    "aschedule_callback",
    "aschedule_delay",
    "aschedule_many",
    "aschedule_message",
    "aset_policy",
    "atouch",
    "atouch_many",
    "aundo",
    "await_",
]
