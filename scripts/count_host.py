"""Counts the host instructions of small recorded calls on a CPU, and of the calls with their backward passes.

    python scripts/count_host.py [--calls attention mlp] [--profile FOLDER]

It runs the calls of bench/overhead.py with one row under valgrind's callgrind, on one thread. Python's part
is the same on a GPU. Counts of the same code agree within two per cent, whatever else the machine does; times
of calls this short do not.

Needs valgrind with its header, and a C++ compiler (CXX, default g++).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from monoidreduce._command_line import Parser

ROOT = Path(__file__).resolve().parent.parent
CALLS = 100
WARM = 5  # calls before the first that counts: caches of Python, torch and this library are then filled
PASSES = ("forward", "with backward")
REQUESTS = """
#include <valgrind/callgrind.h>
extern "C" void begin() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
extern "C" void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def build(folder: Path) -> Path:
    """A shared library of the requests to callgrind, which are macros of its header."""
    source, library = folder / "requests.cpp", folder / "requests.so"
    source.write_text(REQUESTS)
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    return library


def run_calls(library: str, names: list[str]) -> None:
    """Runs inside of valgrind: asks it for a dump after each pass."""
    import torch

    from bench.overhead import _with_backward, calls

    torch.set_num_threads(1)
    requests = ctypes.CDLL(library)
    of_all = calls(torch.device("cpu"), 1)
    for name in names or of_all:
        call = of_all[name]
        works = (call.monoidreduce, _with_backward(call.monoidreduce, call.leaves))
        for which, work in zip(PASSES, works, strict=True):
            for _ in range(WARM):
                work()
            requests.begin()
            for _ in range(CALLS):
                work()
            requests.end(f"{name}, {which}".encode())


def counts(folder: Path) -> dict[str, int]:
    """The instructions of one call, by what callgrind's dumps in a folder are named after."""
    found = {}
    for dump in sorted(folder.glob("callgrind.*"), key=lambda path: int(path.suffix[1:])):
        # Of several lines "desc", the last one has the name of the dump.
        lines = dict(line.split(": ", 1) for line in dump.read_text().splitlines() if ": " in line)
        found[lines["desc"].removeprefix("Trigger: Client Request: ")] = int(lines["totals"]) // CALLS
    return found


def main() -> None:
    parser = Parser(prog="python scripts/count_host.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--calls", nargs="*", default=[], metavar="NAME", help="of bench/overhead.py; default: all"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="keep callgrind's dumps, for callgrind_annotate"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return run_calls(options.inside, options.calls)
    for tool in ("valgrind", os.environ.get("CXX", "g++")):
        if shutil.which(tool) is None:
            parser.error(f"{tool}: expected on PATH, is not there")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.profile or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        library = build(Path(temporary))
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={folder}/callgrind",
        ]
        command += [sys.executable, __file__, "--inside", str(library), "--calls", *options.calls]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        for name, count in counts(folder).items():
            print(f"{name:40} {count / 1000:7.1f} thousand")


if __name__ == "__main__":
    main()
