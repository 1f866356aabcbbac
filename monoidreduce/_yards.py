"""What operators call that stands beside them: folds of users' functions, and several ranks.

The core does not import these. `monoidreduce/__init__.py` puts two functions here, which import
`folds/for_operators.py` and `distributed/for_operators.py` when they are first called, and return them.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["folds", "ranks"]

folds: Callable[[], Any]
ranks: Callable[[], Any]
