"""Claims rows, runs their processors, and settles the outcomes.

The modules, in the order of the path of a task:

    runner          claims the rows of one chunk, in a backlog while the last one runs, and reports
                    what became of them
    chunk           the rows of one claim, run one by one, in batches or in threads within their
                    time budget
    calls           calls a processor for one task or a batch, unless the rows are not run here
    celery_context  the current task, signals and time limits of Celery around a call
    time_limits     the soft and hard time limits of processors
    outcome_rules   from what a processor returned or raised to the settlement of its task
    settler         writes settlements, with retries, arms the tasks that run again, and tells the
                    observers of runs
"""
