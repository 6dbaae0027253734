"""Text from processors and strangers, made fit to store and to show."""

from __future__ import annotations

import re
import traceback
from datetime import datetime

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_CUT = "\n… {n:,} characters left out …\n"


def storable(text: str, max_bytes: int) -> str:
    """`text` without what databases refuse, its middle left out when it is too long."""
    text = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    if len(text.encode()) <= max_bytes:
        return text
    # At most four bytes a character, and the end of a traceback says more than its start.
    keep = max(max_bytes - 64, 0) // 4
    head = keep // 4
    return text[:head] + _CUT.format(n=len(text) - keep) + text[len(text) - (keep - head) :]


#: How the error of a row begins whose tag nobody here had a processor for.
NO_PROCESSOR = "no such processor, tag="


#: How the error of a row begins whose body is encrypted with a key that was not there; the key's name follows.
NO_KEY = "no such encryption key, key="

#: How the error of a row begins whose tag has time limits that the worker's pool could not keep.
NO_TIME_LIMITS = "this worker's pool can not keep time limits, tag="


#: The codes of these reasons, as programs read them.
DEFERRALS = {NO_PROCESSOR: "no_processor", NO_KEY: "no_key", NO_TIME_LIMITS: "no_time_limits"}


#: A task that cannot run here is tried again after a tenth of the time that it has waited, within these bounds.
DEFER_MIN_S, DEFER_MAX_S = 5.0, 600.0


def defer_until(why: str, due: datetime) -> str:
    return f"{why}; next try at {due.isoformat()}"


def is_deferred_until(text: str, due: datetime) -> bool:
    """Whether that, and nothing since, is why a row is due then."""
    return text.endswith(defer_until("", due))


def traceback_text(error: BaseException, max_bytes: int) -> str:
    """The full traceback from the processor's frame on; survives errors that can not say themselves."""
    frames = error.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).startswith(
        "delaytasks."
    ):
        frames = frames.tb_next
    try:
        text = "".join(
            traceback.format_exception(type(error), error, frames or error.__traceback__)
        )
    except Exception as unsayable:
        text = f"{type(error).__name__} (its text can not be made: {type(unsayable).__name__})"
    return storable(text, max_bytes)


def last_line(error: str | None, longest: int = 200) -> str:
    """Return the line of a traceback that says what happened: the first one after its frames."""
    lines = (error or "").strip().split("\n")
    last_frame = max((n for n, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    after = [line for line in lines[last_frame + 1 :] if line and not line.startswith(" ")]
    return one_line(after[0] if after else lines[-1], longest)


def shown(value: object, longest: int = 60) -> str:
    """`repr` for messages: short, and there even for what can not say itself (strangers' objects, huge integers)."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[:longest] + "…"


def one_line(text: str, longest: int = 200) -> str:
    """For logs and tables: control characters escaped, so that nobody forges a line or colours a terminal."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:longest]
    )
    return shown if len(text) <= longest else shown + "…"
