"""Speed, memory, accuracy and call overhead beside torch and other libraries: `python bench/run.py`."""
