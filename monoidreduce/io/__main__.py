"""python -m monoidreduce.io: the same as python -m monoidreduce io."""

from __future__ import annotations

import sys

from monoidreduce._command_line import exit_with

from .command import main

if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
