"""`session=`: the row is part of the caller's transaction, and its commit arms the task, on
every database."""
