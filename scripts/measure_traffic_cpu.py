"""Counts what the CPU engine moves between a cache and memory, and compares it with a model of its schedule.

    python scripts/measure_traffic_cpu.py [--check] [--out bench/results]

It compiles scripts/traffic_cpu.cpp with the engine for AVX2 and runs it under valgrind's callgrind. That
simulates a first-level cache and a last-level one of 256 KiB, 1 MiB or 4 MiB. The model is
scripts/cpu_schedule.py. No other process on the machine changes a count.

Needs valgrind with its header, and a C++ compiler (CXX, default g++) for x86-64.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from cpu_schedule import ITEM, LINE, Cache, Shape, Tile, backward, compulsory, forward

from bench.machine import environment
from bench.report import Row
from bench.traffic import add_options, check_folder, report, row
from monoidreduce._command_line import Parser, exit_with

ROOT = Path(__file__).resolve().parent.parent
CACHES = (256 << 10, 1 << 20, 4 << 20)
# No pass uses about as many bytes again and again as a cache holds: there a count depends on which sets lines
# fall into. At width 64 the forward pass of attention does, with 256 KiB.
SHAPES = {"attention": Shape(512, 768, 128, 128), "cross_entropy": Shape(512, 1536, 192)}
CALIBRATION = Shape(1024, 0, 64)
FIRST_LEVEL = 32 << 10, 8  # bytes, lines of a set
WAYS = 16  # lines of a set of the last level
TOLERANCE = 0.15  # of the bytes read and written together
SLACK = 8 * LINE  # of the calibration, for the stack and the program's own variables
PHASES = ("forward", "backward")
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-mavx2", "-mfma", "-mf16c")
SOURCES = tuple(
    ROOT / name
    for name in (
        "scripts/traffic_cpu.cpp",
        "csrc/cpu/attention.cpp",
        "csrc/cpu/cross_entropy.cpp",
        "csrc/cpu/fold_tiles.cpp",
    )
)
COLLECTED = "Collected :"
EVENTS = ("Ir", "Dr", "Dw", "I1mr", "D1mr", "D1mw", "ILmr", "DLmr", "DLmw", "ILdmr", "DLdmr", "DLdmw")


class Counted(NamedTuple):
    """Bytes that passed between the last cache and memory."""

    read: int
    written: int


@dataclass(frozen=True)
class Run:
    """A run of the program: an operator or "copy", a phase, a shape, and the last-level cache's bytes."""

    op: str
    phase: str
    shape: Shape
    cache: int


def runs() -> list[Run]:
    """All that is counted, the calibration first."""
    found = [Run("copy", "forward", CALIBRATION, CACHES[1])]
    for op, shape in SHAPES.items():
        found += [Run(op, phase, shape, cache) for cache in CACHES for phase in PHASES]
    return found


def build(compiler: str, folder: Path) -> Path:
    """Compiles the program. Raises SystemExit with the compiler's first line where it cannot."""

    def compiled(source: Path) -> Path:
        to = folder / f"{source.stem}.o"
        headers = (f"-I{ROOT / at}" for at in ("csrc", "csrc/include"))
        command = [compiler, *FLAGS, *headers, "-c", str(source), "-o", str(to)]
        run_or_exit(command, "cannot be compiled")
        return to

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(found) for found in pool.map(compiled, SOURCES)]
    program = folder / "traffic_cpu"
    run_or_exit([compiler, *objects, "-pthread", "-o", str(program)], "cannot be linked")
    return program


def run_or_exit(command: list[str], what: str) -> subprocess.CompletedProcess[str]:
    """Runs a command. Raises SystemExit with the last line that it printed where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:]
        raise SystemExit(f"{command[0]}: {what}: {' '.join(last) or done.returncode}")
    return done


def counts(text: str, flushed: int) -> Counted:
    """What callgrind says, less the lines of the loop that flushes. Raises ValueError for other text.

    text: callgrind's lines on stderr. flushed: bytes that the program read at the end.
    """
    lines = [line.split(COLLECTED)[1].split() for line in text.splitlines() if COLLECTED in line]
    if len(lines) != 1 or len(lines[0]) > len(EVENTS):
        raise ValueError(f"callgrind: expected one line {COLLECTED} of {', '.join(EVENTS)}, got {lines}")
    of = dict(zip_longest(EVENTS, map(int, lines[0]), fillvalue=0))  # it leaves out zeros at the end
    read = of["DLmr"] + of["DLmw"] - flushed // LINE
    return Counted(LINE * read, LINE * (of["ILdmr"] + of["DLdmr"] + of["DLdmw"]))


def count(program: Path, run: Run) -> tuple[list[int], Counted]:
    """The numbers that the program prints about its tile, and the bytes."""
    flushed = 4 * run.cache
    shape = run.shape
    size, ways = FIRST_LEVEL
    done = run_or_exit(
        [
            "valgrind",
            "--tool=callgrind",
            "--cache-sim=yes",
            "--simulate-wb=yes",
            "--instr-atstart=no",
            f"--D1={size},{ways},{LINE}",
            f"--LL={run.cache},{WAYS},{LINE}",
            "--callgrind-out-file=/dev/null",
            str(program),
            run.op,
            run.phase,
            *map(str, (shape.rows, shape.columns, shape.width, flushed)),
        ],
        "failed",
    )
    return [int(number) for number in done.stdout.split()], counts(done.stderr, flushed)


def modelled(run: Run, tile: list[int]) -> Counted:
    """What the schedule moves. tile: what the program printed."""
    if run.op == "copy":  # two operands are read, and the lines of the result
        size = ITEM * run.shape.rows * run.shape.width
        return Counted(3 * size, size)
    cache = Cache(run.cache)
    play = forward if run.phase == "forward" else backward
    play(cache, run.shape, Tile(*tile))
    return Counted(cache.read, cache.written)


def measured(program: Path, run: Run) -> Row:
    """A row of the table."""
    tile, counted = count(program, run)
    shape, calibration = run.shape, run.op == "copy"
    names = {"attention": "L N d", "cross_entropy": "N V D", "copy": "rows columns width"}[run.op].split()
    sizes = dict(zip(names, (shape.rows, shape.columns, shape.width), strict=True))
    found = row(
        run.op,
        "float32",
        {name: size for name, size in sizes.items() if size} | {"cache": f"{run.cache >> 10} KiB"},
        run.phase,
        3 * ITEM * shape.rows * shape.width if calibration else compulsory(shape, run.phase),
        modelled(run, tile)._asdict(),
        tolerance=0.0 if calibration else TOLERANCE,
        slack=SLACK if calibration else 0,
        compared=("read", "written") if calibration else ("moved",),
    )
    return {**found, "counter": counted._asdict()}


def main(argv: list[str]) -> int:
    """Counts, prints the table and returns the exit status."""
    parser = Parser(prog="python scripts/measure_traffic_cpu.py", description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args(argv)
    compiler = os.environ.get("CXX", "g++")
    for tool in ("valgrind", compiler):
        if shutil.which(tool) is None:
            parser.error(f"{tool}: expected on PATH, is not there")
    check_folder(parser, options.out)
    with tempfile.TemporaryDirectory() as folder:
        program = build(compiler, Path(folder))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rows = list(pool.map(lambda run: measured(program, run), runs()))
    version = run_or_exit(["valgrind", "--version"], "failed").stdout.strip()
    machine = environment(torch.device("cpu"), "python scripts/measure_traffic_cpu.py")
    machine |= {"valgrind": version, "threads": 1, "cpu_isa": "avx2"}
    return report(machine, rows, options.out, options.check, "cpu")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
