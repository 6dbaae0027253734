"""Statistics: what workers have run in the last two days, and groups of failures.

    statistics_table  what a worker's main process counts from the reports of its pool, the table,
                      and the writer that fills it once a minute
    reading           `delays.statistics`, its results, and what the verdict and the console read

The pool processes count with `delaytasks.run.observers`.
"""
