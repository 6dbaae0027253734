"""What a user does if the tables are missing or old, for messages."""

from __future__ import annotations

#: The command for a Celery app of the user's own. A `DelayTasks` of an integration with a web
#: framework names the command of the framework instead.
TABLES_REMEDY = "run: delaytasks -A APP db upgrade"
