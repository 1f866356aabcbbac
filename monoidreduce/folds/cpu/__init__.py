"""Programs for the interpreter of the CPU engine."""
