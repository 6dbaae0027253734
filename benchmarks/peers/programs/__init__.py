"""One module for each system; only its own environment has what it imports."""
