"""The operations behind `DelayTasks`: lookups, changes of single and of many tasks, policies."""
