"""The task table in PostgreSQL partitions: made, converted and dropped with the tasks in them."""
