"""Invalid input from callers and other programs: each kind raises its own error, and no call is
half done."""
