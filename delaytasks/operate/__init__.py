"""What methods of `DelayTasks` share, and what only people read: the state, `why`, the forecast."""
