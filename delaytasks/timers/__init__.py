"""Where near tasks wait until they are due."""
