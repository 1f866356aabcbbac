"""The planner of training runs, under the name that users import; it is in `monoidreduce.theory.plan`."""

from monoidreduce.theory.plan import *  # noqa: F403
from monoidreduce.theory.plan import __all__ as __all__
