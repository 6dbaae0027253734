"""Metrics, traces and error reports, with the real libraries and programs."""
