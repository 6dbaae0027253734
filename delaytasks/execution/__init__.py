"""Claims rows, runs their processors and settles what came of them."""
