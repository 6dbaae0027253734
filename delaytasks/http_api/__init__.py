"""The HTTP API: schedule, look up and change tasks from programs in any language.

    application  makes the WSGI application from a `DelayTasks` and its API keys; the document
    routes       the functions of the routes, and the table from which both are made
    schemas      the JSON Schemas of parameters, requests and responses, and their checks
    requests     checks before a route is called: key, limits, permission, schema; problems
    api_keys     the keys, their scopes and limits, and the file with their hashes

No other package imports this one, except the commands `serve` and `api-key`, and the integrations.
"""
