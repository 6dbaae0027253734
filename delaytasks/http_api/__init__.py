"""The HTTP API: schedule, look up and change tasks from programs in any language.

    application     makes the WSGI application from a `DelayTasks` and its API keys
    routes          the table of routes, from which the application and the document are made
    schemas         the JSON Schemas of parameters, requests and responses
    validation      checks values by these schemas
    openapi         the OpenAPI document
    api_keys        the keys, their scopes, and the file with their hashes
    requests        checks before a route is called: key, limits, permission, schema
    request_limit   how many requests a key may make
    idempotency     repeated requests with the same Idempotency-Key schedule one task
    problems        errors as problem documents
    new_tasks, tasks, recurring_schedules   the functions of the routes

No other package imports this one, except the commands `serve` and `api-key`, and the integrations.
"""
