"""The task table in partitions."""
