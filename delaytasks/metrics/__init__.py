"""Metrics of a deployment: what its tables contain, and what a process has run.

    snapshot     the metrics of the database, the broker, the timer and the forecast
    process      the metrics of a worker's main process, and of a process that schedules tasks
    prometheus   serves them to Prometheus, over HTTP or in a file
    files        the Grafana dashboard and the alert rules

All but the files need the extra `prometheus`. `delaytasks serve --metrics` serves the snapshot. See
docs/metrics.md.
"""
