"""Theory: predicted costs of calls, plans of training runs, and the I/O complexity of attention."""
