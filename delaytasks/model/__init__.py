"""Values and rules of delayed tasks; standard library only."""
