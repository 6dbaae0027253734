"""The tags and keys of rows that wait in place of Celery tasks.

The row of the Celery task `shop.remind` has the tag `celery:shop.remind`, and its key is the id of
the Celery task. So the rows are found, paused, limited and cancelled like those of any other tag.
"""

from __future__ import annotations

import hashlib

from delaytasks.core.errors import InvalidKeyError
from delaytasks.core.inputs import TAG_LENGTH, check_key

CELERY_PREFIX = "celery:"
#: The tag under which the processor of all these rows is registered.
ANY_CELERY_TASK = "delaytasks.celery"
#: Hexadecimal digits that tell long names apart whose beginnings are equal.
_DIGITS = 16


def celery_tag(name: str) -> str:
    """Return the tag of a Celery task; a name that is too long for a tag is shortened."""
    tag = CELERY_PREFIX + name
    if len(tag) <= TAG_LENGTH:
        return tag
    return f"{tag[: TAG_LENGTH - _DIGITS - 1]}~{_digest(name)}"


def processor_tag(tag: str) -> str:
    """Return the tag under which the processor of `tag` may be registered as well."""
    return ANY_CELERY_TASK if tag.startswith(CELERY_PREFIX) else tag


def celery_key(task_id: str) -> str:
    """Return the key for the id of a Celery task, which may be any text."""
    try:
        return check_key(task_id)
    except InvalidKeyError:
        return _digest(task_id)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
