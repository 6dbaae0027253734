"""Checks the input of calls, writes the rows, and arms the timer for rows that are due soon."""
