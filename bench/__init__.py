"""Speed, memory, accuracy and overhead, compared with torch and other libraries: `python bench/run.py`."""
