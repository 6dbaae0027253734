"""The HTTP API: schedule, look up and change tasks from programs in any language.

    routes       the WSGI application: the checks before a route is called, the functions of the
                 routes, and the table of them, from which the OpenAPI document is made
    schemas      the JSON Schemas of parameters, requests and responses, and their checks
    api_keys     the keys, their scopes, and the file with their hashes

No other package imports this one, except the commands `serve` and `access`, and the integrations.
"""
