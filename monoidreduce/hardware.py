"""Accelerators and their rates, under the name that users import; it is in `monoidreduce.theory.hardware`."""

from monoidreduce.theory.hardware import *  # noqa: F403
from monoidreduce.theory.hardware import __all__ as __all__
