"""The command line of the package. COMMAND -h lists the arguments of a command.

info    what was built, the devices and the path each operator takes on them
demo    train a small language model with and without monoidreduce and compare
bench   speed, memory and accuracy beside torch and other libraries; needs a clone of the repository
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import monoidreduce as mr


def info(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m monoidreduce info").parse_args(argv)
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


def demo(argv: list[str]) -> int:
    from monoidreduce import demo

    return demo.main(argv)


def bench(argv: list[str]) -> int:
    for folder in (Path.cwd(), Path(mr.__file__).parent.parent):
        script = folder / "bench" / "run.py"
        if script.is_file():
            sys.argv = [str(script), *argv]
            runpy.run_path(str(script), run_name="__main__")
            return 0
    print("bench: bench/run.py is not in the installed package; run this in a clone of the repository")
    return 1


COMMANDS = {command.__name__: command for command in (info, demo, bench)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m monoidreduce",
        allow_abbrev=False,
        description=__doc__,
        usage="%(prog)s [-h] [--includes] [--cmakedir] [COMMAND ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--includes", action="store_true", help="print the folder of the C++ headers")
    parser.add_argument(
        "--cmakedir", action="store_true", help="print the folder of monoidreduceConfig.cmake"
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.includes:
        print(mr.get_include())
    if options.cmakedir:
        print(mr.get_cmake_dir())
    if options.command:
        return COMMANDS[options.command](options.arguments)
    if not (options.includes or options.cmakedir):
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
