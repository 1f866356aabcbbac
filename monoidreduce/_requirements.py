"""Refuses a torch that is too old, in place of the failures that it would lead to."""

import re

import torch

LEAST_TORCH = (2, 6)

_found = str(getattr(torch, "__version__", "a module without a version"))
_numbers = re.match(r"(\d+)\.(\d+)", _found)
if _numbers is None or tuple(map(int, _numbers.groups())) < LEAST_TORCH:
    raise ImportError(f"monoidreduce needs torch >= {'.'.join(map(str, LEAST_TORCH))}, found {_found}")
