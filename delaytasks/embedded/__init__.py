"""A broker for a machine without services: a private Redis on a Unix socket, or plain files.

The broker listens on no port. The database has all tasks, so the broker's files may be deleted at
any time. `delaytasks up` starts the Redis, and `python -m delaytasks.cli.embedded` does so for a
Procfile.
"""
