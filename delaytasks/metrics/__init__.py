"""Metrics of a deployment: what its tables contain, and what a worker has run.

    families       the values of one metric, without a library for metrics
    snapshot       the metrics of the database, the broker and the timer
    peak           the metrics of a forecast
    worker         the metrics of a worker's main process
    producer       the metrics of a process that schedules tasks
    prometheus     serves them to Prometheus, over HTTP or in a file
    endpoint       starts this in a worker whose settings ask for it
    files          the Grafana dashboard and the alert rules

`delaytasks exporter` serves the snapshot. See docs/metrics.md.
"""
