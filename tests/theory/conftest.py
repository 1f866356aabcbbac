"""The benchmarks of the clone are on the path, behind an installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
