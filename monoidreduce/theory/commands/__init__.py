"""The commands of `python -m monoidreduce` about costs, plans and the I/O of attention: each has a `main`."""
