"""The console: web pages that show whether tasks run on time, what failed and why, and repair it.

    application     makes the WSGI application from a `DelayTasks` and the rule for its viewers
    viewers         the roles, who the viewer of a request is, and the file of users
    requests        what requests share, and what happens before and after each: role, CSRF token
    charts          charts as SVG
    shown           times, numbers and tasks as the pages show them
    forms           the forms of operations, and the function that performs them
    pages_*         one module for each group of pages

No other package imports this one, except the commands `serve` and `access`, and the integrations.
"""

from delaytasks.model.text import needs_extra

with needs_extra("console", "the console"):
    import flask as flask
