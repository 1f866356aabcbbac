"""Speed, memory and call overhead of the operators beside torch: `python bench/run.py`."""
