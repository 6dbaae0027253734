"""The core's SQL: one module for each table or purpose."""
