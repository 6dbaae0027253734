"""Recurring schedules: rows that say when tasks recur, from which sweeps make the tasks.

A process imports this package when it uses `DelayTasks.recurring`, or when its sweep finds that a
schedule is due. The modules:

====================  =============================================================================
`recurring`           the methods of `delays.recurring`, and the schedules that code declares
`definition`          what callers define, what the table has, the tag and body of the tasks, which
                      may be those of a Celery task, and when they are due: cron expressions,
                      intervals and Celery's schedules
`creation`            the stage of the sweep that chooses the occurrences and writes their tasks
====================  =============================================================================
"""
