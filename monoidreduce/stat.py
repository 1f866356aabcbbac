"""Statistics of a row of scores, under the name that users import; they are in `monoidreduce.folds.stat`."""

from monoidreduce.folds.stat import *  # noqa: F403
from monoidreduce.folds.stat import __all__ as __all__
