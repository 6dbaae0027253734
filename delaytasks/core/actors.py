"""Who does something, where the caller does not say it."""

from __future__ import annotations

import getpass
import os
import socket

from delaytasks.core.inputs import ACTOR_LENGTH, check_actor
from delaytasks.core.text import one_line


def actor_of(given: object) -> str:
    """The name that a call gives, or who runs this process, and where."""
    if given is not None:
        return check_actor(given)
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        name = f"uid {os.getuid()}"
    return one_line(f"{name}@{socket.gethostname()}", ACTOR_LENGTH - 1)
