"""The I/O of attention, under the name that users import; it is in `monoidreduce.theory.io`."""

from monoidreduce.theory.io import *  # noqa: F403
from monoidreduce.theory.io import __all__ as _names
from monoidreduce.theory.our_tiles import our_tiles

__all__ = [*_names, "our_tiles"]
