"""The SQL of the core: one module for each table or purpose; `store` has all of one database."""
