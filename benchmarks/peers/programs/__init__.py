"""One module per system. Its imports exist only in the environment of the peers."""
