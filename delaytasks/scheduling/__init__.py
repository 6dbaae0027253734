"""Checks what callers ask for, writes the rows, and arms the timer for rows that are due soon."""
