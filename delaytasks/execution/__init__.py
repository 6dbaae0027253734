"""Claims rows, runs their processors, and settles the outcomes."""
