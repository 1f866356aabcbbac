"""Ctrl-C ends `python -m monoidreduce` with one line while it still imports, which takes seconds.

Once a command runs, `_command_line` takes over.
"""

import os
import signal
import sys
from typing import NoReturn


def leave(*_: object) -> NoReturn:
    """Handles SIGINT: ends the process at once, whatever is half imported."""
    os.write(2, b"interrupted\n")
    os._exit(130)  # what shells give a command that Ctrl-C ended


# While `python -m` imports the package of a module, sys.argv[0] is "-m" and nothing else names the module.
_is_command = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("monoidreduce")
# Who ignores SIGINT, as a shell does for its background jobs, goes on ignoring it.
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
