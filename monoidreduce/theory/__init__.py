"""What is known of a call before it runs: costs, plans of training runs, and the I/O of attention."""
