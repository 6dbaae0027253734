"""The console: web pages that show whether tasks run on time, what failed and why, and repair it.

    application     makes the WSGI application from a `DelayTasks` and the rule for its viewers
    viewers         the roles, and who the viewer of a request is
    users           the file of users and their hashed passwords
    requests        what happens before and after each request: role, CSRF token, headers
    snapshot        what the pages show of the whole deployment, cached for all viewers
    verdict         the state of the deployment in one sentence
    bulk_runs       bulk operations in threads, with their progress
    pages_*         one module for each group of pages

No other package imports this one, except the command `delaytasks console` and the integrations.
"""
