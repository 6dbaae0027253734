"""Statistics: what workers have run, and what the sweep has counted.

    worker_counts       the counts of a worker's main process, which its pool processes report
    writer              writes them to the database once a minute
    queries             the SQL of the two tables
    periods             minutes, hours of minutes, days of hours
    stored_counts       the form in which counts are stored
    gauge_queries       counts the tasks of each status
    maintenance         the stage of the sweep: gauges, roll-up, purge
    api                 `delays.statistics`
    reading             reads the tables of all databases
    results             the values that it returns
    on_time             the shares of tasks on time of an hour, a day and a week

The pool processes count with `delaytasks.execution.run_counter`.
"""
