"""The command line of the package. COMMAND -h lists the arguments of a command.

info       what was built, the devices and the path each operator takes on them
demo       train a small language model, or one of transformers, with and without monoidreduce and compare;
           or follow a fold of one's own to its kernels
bench      speed, memory and accuracy beside torch and other libraries; needs a clone of the repository
plan       time and memory of a training step of a transformer on many devices, from formulas
io         words that algorithms for the gradient of attention move, and bounds on them
cost       FLOPs, bytes, memory and time of a call on a GPU that need not be there, or on a CPU
roofline   results of the benchmarks under the roofs of their GPU, as a picture
calibrate  rates of this machine's matrix products and copies
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

import monoidreduce as mr
from monoidreduce._command_line import Parser, check_environment, exit_with, find_clone

PROGRAM = "python -m monoidreduce"


def info(argv: list[str]) -> int:
    parser = Parser(prog=f"{PROGRAM} info")
    parser.parse_args(argv)
    check_environment(parser)
    facts = mr.backend_info()
    print(f"monoidreduce {facts['version']} with torch {facts['torch']}")
    print("\nbuild")
    for name, value in facts["build"].items():
        print(f"  {name:<22}{', '.join(map(str, value)) if isinstance(value, list) else value}")
    print("\ndevices")
    print(f"  CPU, {facts['cpu']['isa']}, {facts['cpu']['threads']} threads")
    for device in facts["cuda_devices"]:
        print(f"  {device}")
    none = "no GPU" if facts["build"]["cuda"] else "none, this build is CPU-only"
    print("\noperator                paths, at widths of 128")
    for operator, paths in facts["paths"].items():
        for title, on, label in ((operator, "cpu", "CPU"), ("", "cuda", "GPU")):
            by_dtype = ", ".join(f"{dtype} {path}" for dtype, path in (paths[on] or {}).items())
            print(f"{title:<24}{label}: {by_dtype or none}")
    return 0


def bench(argv: list[str]) -> int:
    here, clone = Path(os.path.realpath(".")), find_clone()
    if clone is None:
        Parser(prog=f"{PROGRAM} bench").error(f"{here}: not a clone of monoidreduce, which has bench/run.py")
    if clone != here:  # where a folder bench/ would be taken for the clone's
        sys.path = [entry for entry in sys.path if Path(entry).resolve() != here]
    script = str(clone / "bench" / "run.py")
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
    return 0


# Commands that are modules, imported when they are run.
MODULES = {
    "demo": "monoidreduce.demo",
    **{
        name: f"monoidreduce.theory.commands.{name}"
        for name in ("plan", "io", "cost", "roofline", "calibrate")
    },
}
COMMANDS = ("info", "demo", "bench", "plan", "io", "cost", "roofline", "calibrate")


def run(command: str, argv: list[str]) -> int:
    """The exit status of a command."""
    if command in MODULES:
        status: int = import_module(MODULES[command]).main(argv)
        return status
    return {"info": info, "bench": bench}[command](argv)


def main(argv: list[str]) -> int:
    parser = Parser(
        prog=PROGRAM,
        description=__doc__,
        usage="%(prog)s [-h] [--version] [--includes] [--cmakedir] [COMMAND ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"monoidreduce {mr.__version__}")
    parser.add_argument("--includes", action="store_true", help="print the folder of the C++ headers")
    parser.add_argument(
        "--cmakedir", action="store_true", help="print the folder of monoidreduceConfig.cmake"
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        if options.includes:
            print(mr.get_include())
        if options.cmakedir:
            print(mr.get_cmake_dir())
    except ImportError as error:
        parser.error(str(error))
    if options.command:
        return run(options.command, options.arguments)
    if not (options.includes or options.cmakedir):
        parser.print_help()
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
