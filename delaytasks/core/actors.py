"""The name of the person or program that changes many tasks or a policy."""

from __future__ import annotations

import getpass
import os
import socket

from delaytasks.core.inputs import ACTOR_LENGTH, check_actor
from delaytasks.core.text import one_line


def actor_of(given: object) -> str:
    """Return the given name, or the user and host of this process."""
    if given is not None:
        return check_actor(given)
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = f"uid {os.getuid()}"
    return one_line(f"{name}@{socket.gethostname()}", ACTOR_LENGTH - 1)
