"""Counts, histograms and error patterns."""
