"""The HTTP API: schedule, look up and change tasks from programs in any language.

    routes       the WSGI application: the routes of the operations in `operate/operations.py`, the
                 checks before an operation is called, the JSON Schemas, and the OpenAPI document
    api_keys     the keys, their scopes, and the file with their hashes

No other package imports this one, except the commands `serve` and `access`, and the integrations.
"""
