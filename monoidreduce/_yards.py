"""Access from operators to two packages that the core does not import: `folds` and `distributed`.

`monoidreduce/__init__.py` sets two functions here. Each imports a module on its first call and returns it:
`folds/for_operators.py` and `distributed/for_operators.py`.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["folds", "ranks"]

folds: Callable[[], Any]
ranks: Callable[[], Any]
