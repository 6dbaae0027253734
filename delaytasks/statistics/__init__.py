"""Statistics: what workers have run in the last two days, and groups of failures.

    worker_counts     the counts of a worker's main process, which its pool processes report
    writer            writes them to the database once a minute
    statistics_table  the SQL of the two tables
    reading           `delays.statistics`, and what the verdict and the console read
    results           the values that it returns
    charts            charts as SVG

The pool processes count with `delaytasks.execution.settlement`.
"""
