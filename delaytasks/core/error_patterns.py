r"""Patterns of error texts, by which failures are grouped.

A pattern is what the errors of one kind have in common: the innermost function of the user's code,
the type of the exception, and its message. `*` stands for what differs from task to task: numbers,
ids, quoted text. The filter `error=` of `find` and of the bulk functions takes such a pattern, so a
group of failures and the tasks that belong to it have one name:

    * in charge\n*ValueError: order * of * was not found*
"""

from __future__ import annotations

import re
import sysconfig

#: The longest pattern. The rest of a long message is left out.
MAX_PATTERN = 300
#: The part of an error text that is searched, since a text may have 64 KiB.
_MAX_SEARCHED = 16_384
#: The longest part of a message that becomes a pattern.
_MAX_MESSAGE = 500

#: UUIDs, quoted text, addresses, and every word that contains a digit.
_VARIABLE = re.compile(
    r"""
    '[^'\n]*' | "[^"\n]*" | `[^`\n]*`
    | <[^<>\n]*\ at\ 0x[0-9a-fA-F]+>
    | \b[0-9a-fA-F]{8,}\b
    | [-+\w./:@%#$]*\d[-+\w./:@%#$]*
    """,
    re.VERBOSE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line \d+, in (?P<name>[^\n]+)$', re.MULTILINE)
#: The first line of an exception, which begins at the margin: its type, and perhaps a message.
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>[^\n]*))?$", re.MULTILINE)
#: Files of Python and of installed packages, which are not the user's code.
_INSTALLED = (
    *{sysconfig.get_path(name).replace("\\", "/") for name in ("stdlib", "platstdlib")},
    *("/site-packages/", "/dist-packages/"),
)


def error_pattern(text: str) -> str:
    """Return the pattern of an error text: a traceback, or the reason of an outcome."""
    if len(text) > _MAX_SEARCHED:
        text = text[-_MAX_SEARCHED:]
    frames = list(_FRAME.finditer(text))
    if not frames:
        return _limited(_without_variables(text.split("\n", 1)[0]) + "*")
    last = frames[-1]
    exception = _EXCEPTION.search(text, last.end())
    own = next((frame for frame in reversed(frames) if _is_users(frame["file"])), last)
    where = f"* in {_escaped(own['name'])}\n*"
    if exception is None:
        return _limited(where)
    message = exception["message"]
    what = _escaped(exception["type"])
    if message:
        what += ": " + _without_variables(message)
    return _limited(where + what + "*")


def _is_users(path: str) -> bool:
    path = path.replace("\\", "/")
    return not path.startswith("<") and not any(part in path for part in _INSTALLED)


def _without_variables(message: str) -> str:
    """Replace the variable parts by `*`. A `*` of the message itself becomes one, too."""
    return _VARIABLE.sub("*", message[:_MAX_MESSAGE])


def _escaped(name: str) -> str:
    return re.sub(r"\d+", "*", name.strip())


def _limited(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        pattern = pattern[: MAX_PATTERN - 1] + "*"
    return re.sub(r"\*+", "*", pattern)
