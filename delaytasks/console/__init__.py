"""The console: web pages that show whether tasks run on time, what failed and why, and repair it.

    application     makes the WSGI application from a `DelayTasks` and the rule for its viewers
    requests        the roles and the users, the shared state, and the checks of each request
    shown           times, numbers and tasks as the pages show them, and charts as SVG
    forms           the forms of operations, and the function that performs them
    pages           functions that read what the pages show

No other package imports this one, except the commands `serve` and `access`, and the integrations.
"""

from delaytasks.model.text import needs_extra

with needs_extra("console", "the console"):
    import flask as flask

from delaytasks.console.application import make_console
from delaytasks.console.requests import Role, UserFile, Viewer

__all__ = ["Role", "UserFile", "Viewer", "make_console"]
