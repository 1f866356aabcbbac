"""Refuses a folder of sources without its compiled module, in place of an import that seems circular."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("monoidreduce._C") is None:
    _package = Path(__file__).parent
    _clone = (_package.parent / "CMakeLists.txt").exists()
    _version = ".".join(map(str, sys.version_info[:2]))
    _others = sorted(path.name for path in _package.glob("_C.*.so"))
    raise ImportError(
        f"monoidreduce is not built: {_package} has no compiled module _C for Python {_version}"
        + (f", only {', '.join(_others)}" if _others else "")
        + (
            f". Build it there with `pip install -e {_package.parent}`, or run Python in another folder"
            " to import an installed monoidreduce"
            if _clone
            else ". Install it again with this Python"
        )
    )
