"""Recurring schedules on each database."""
