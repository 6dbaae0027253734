"""Forecasts: what becomes due in the next days, and how late it starts with how many workers.

A process imports this package with the first call of `DelayTasks.forecast`. The modules:

====================  =============================================================================
`operations`          reads the databases, and keeps the last results
`question`            checks the arguments of callers
`queries`             the SQL: how many tasks are due, counted or estimated
`due_counts`          numbers of tasks by queue, tag and second
`recurring_counts`    the tasks that recurring schedules are going to make
`measured`            the durations of tasks, from the statistics of the workers
`rates`               how long the tasks of a tag occupy a process, and the limits of a tag
`pools`               which queues are served by the same workers
`simulation`          when tasks start
`steps`               the numbers and the lateness of each step and tag
`combining`           one forecast from all of these
`result`              what callers get
`latest`              keeps a recent forecast for callers that must not wait
`sentences`           the result in words
====================  =============================================================================
"""
