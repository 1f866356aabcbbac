"""Fresh interpreters that have imported torch and nothing else, forked from one process.

A fork saves the two seconds that importing torch takes. Only for tests that do not depend on threads: in a
forked process the library uses its own threads in place of torch's.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

# Serves one request a line: code, arguments and environment. The answer is the fork's exit status and output.
_SERVE = """
import json, os, sys, tempfile, traceback
import torch
for line in sys.stdin:
    code, arguments, environment = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = ["-c", *arguments]
            failed = 0
            try:
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                failed = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    print(json.dumps([status, *texts]), flush=True)
"""


class Ended(NamedTuple):
    """The fields of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


@cache
def _server() -> Any:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", _SERVE], text=True, **pipes)
    atexit.register(process.kill)
    return process


def run_after_torch(code: str, *arguments: str, **environment: str) -> Ended:
    """Run code in an interpreter that has imported torch.

    environment: variables to set in addition to those of this process.
    """
    server = _server()
    json.dump([code, arguments, {**os.environ, **environment}], server.stdin)
    server.stdin.write("\n")
    server.stdin.flush()
    return Ended(*json.loads(server.stdout.readline()))
