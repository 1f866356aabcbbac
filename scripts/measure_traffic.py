"""Counts what every operator moves on a GPU, with Nsight Compute, and compares it with `mr.cost`.

    python scripts/measure_traffic.py [--small] [--check] [--out bench/results]
    python scripts/measure_traffic.py --counted FILE [--check] [--out bench/results]

One process of ncu watches scripts/traffic_calls.py. It counts bytes of DRAM and of the L2 cache in
one run of each kernel, before which it empties the caches. It does not see what cudaMemset and
cudaMemcpy move.

Needs an NVIDIA GPU that `mr.cost` knows, ncu on PATH, and the right to read its counters. With
--counted it needs none of them: it compares what an earlier run counted with the model as it is now.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from traffic_calls import DTYPE, rows_of

from bench.machine import environment
from bench.report import Row
from bench.traffic import add_options, check_folder, report
from monoidreduce._command_line import Parser, check_environment, exit_with, some_path
from monoidreduce.hardware import find_gpu
from monoidreduce.theory.costs.sizes import OPERATORS, call_of

ROOT = Path(__file__).resolve().parent.parent
METRICS = {  # of L2: what multiprocessors read, and what they add there
    "read": ("dram__bytes_read.sum",),
    "written": ("dram__bytes_write.sum",),
    "l2": ("lts__t_sectors_op_read.sum", "lts__t_sectors_op_red.sum"),
}
COUNTERS = tuple(metric for metrics in METRICS.values() for metric in metrics)
MARK = "spin_kernel"  # torch.cuda._sleep's, before each pass
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 32.0}  # bytes
NCU = (
    "ncu",
    "--profile-from-start=off",
    "--clock-control=none",
    "--cache-control=all",
    "--csv",
    "--page=raw",
    "--print-units=base",
    "--print-kernel-base=function",
    f"--metrics={','.join(COUNTERS)}",
)


@dataclass(frozen=True)
class Kernel:
    """What a kernel moved, in bytes; l2 as the counter has it."""

    name: str
    read: int
    written: int
    l2: int


def kernels(text: str) -> Iterator[Kernel]:
    """The kernels in ncu's CSV, in the order of their launches. Raises ValueError for other text.

    A line of names and a line of units come first; lines that do not begin with a quote are not of the table.
    """
    lines = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(lines) < 2 or not {"Kernel Name", *COUNTERS} <= set(lines[0]):
        raise ValueError(f"ncu: expected a table with Kernel Name, {', '.join(COUNTERS)}")
    names, units, *rows = lines
    column = {name: at for at, name in enumerate(names)}
    for metric in COUNTERS:
        if (unit := units[column[metric]]) not in UNITS:
            raise ValueError(f"ncu: {metric}: expected a unit of {', '.join(UNITS)}, got {unit!r}")

    def counted(line: list[str], metric: str) -> float:
        cell = line[column[metric]]
        try:
            return float(cell.replace(",", "")) * UNITS[units[column[metric]]]
        except ValueError:
            name = line[column["Kernel Name"]]
            raise ValueError(f"ncu: {name}: {metric}: expected a number, got {cell!r}") from None

    for line in rows:
        found = {of: sum(counted(line, metric) for metric in metrics) for of, metrics in METRICS.items()}
        yield Kernel(line[column["Kernel Name"]], **{of: round(value) for of, value in found.items()})


def by_pass(found: Iterator[Kernel]) -> list[list[Kernel]]:
    """The kernels of each pass, which follow a mark."""
    passes: list[list[Kernel]] = []
    for kernel in found:
        if MARK in kernel.name:
            passes.append([])
        elif passes:
            passes[-1].append(kernel)
        else:
            raise ValueError(f"ncu: expected {MARK} first, got {kernel.name}")
    return passes


def with_counters(rows: list[Row], passes: list[list[Kernel]]) -> list[Row]:
    """The rows with what was counted. The first one is the calibration.

    The counter of the L2 cache counts some bytes more than once. How often, the calibration tells,
    whose bytes are known: all are divided by that. Raises ValueError unless each row has kernels.
    """
    if len(rows) != len(passes) or not all(passes):
        counts = ", ".join(str(len(kernels)) for kernels in passes)
        raise ValueError(f"ncu: expected kernels of {len(rows)} passes, got {counts or 'none'}")
    repeated = sum(kernel.l2 for kernel in passes[0]) / rows[0]["model"]["l2"]
    if repeated <= 0:
        raise ValueError(f"ncu: {METRICS['l2'][0]}: expected more than 0 in the calibration, got {repeated}")
    counted = []
    for one, kernels in zip(rows, passes, strict=True):
        total = {of: sum(getattr(kernel, of) for kernel in kernels) for of in METRICS}
        total["l2"] = round(total["l2"] / repeated)
        counted.append({**one, "counter": total, "kernels": [asdict(kernel) for kernel in kernels]})
    return counted


def measured(small: bool) -> list[Row]:
    """Has the calls counted. Raises SystemExit with ncu's errors, or with what was said last, where it fails.

    ncu says ERR_NVGPUCTRPERM where this user may not read counters, and may yet return 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "passes.json"), Path(folder, "ncu.csv")
        calls = [sys.executable, str(ROOT / "scripts" / "traffic_calls.py"), str(file)]
        command = [*NCU, f"--log-file={log}", *calls, *(["--small"] if small else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        said = [line for line in (text + done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("==ERROR==")]
        if done.returncode or errors or not file.exists():
            raise SystemExit(f"ncu: failed with {done.returncode}: {' '.join(errors or said[-2:])}")
        try:
            return with_counters(json.loads(file.read_text()), by_pass(kernels(text)))
        except ValueError as error:
            raise SystemExit(str(error)) from error


def modelled_again(document: Row) -> list[Row]:
    """The rows of an earlier run beside the model as it is now."""
    gpu = find_gpu(document["environment"]["device"])
    calibration, *earlier = document["traffic"]
    rows = [calibration]
    for forward in earlier[::2]:  # and its backward pass
        op, parameters = forward["op"], forward["parameters"]
        tensors = call_of(OPERATORS[op], parameters, DTYPE)[0]
        rows += rows_of(op, parameters, gpu, tensors)
    if [_which(row) for row in rows] != [_which(row) for row in document["traffic"]]:
        raise ValueError("--counted: expected a forward and a backward pass of each case")
    return [{**old, **new} for old, new in zip(document["traffic"], rows, strict=True)]


def _which(row: Row) -> tuple[Any, ...]:
    return row["op"], row["parameters"], row["phase"]


def main(argv: list[str]) -> int:
    """Counts, prints the table and returns the exit status."""
    parser = Parser(prog="python scripts/measure_traffic.py", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes")
    add_options(parser)
    parser.add_argument(
        "--counted", type=some_path, metavar="FILE", help="results of an earlier run, in place of counting"
    )
    options = parser.parse_args(argv)
    check_environment(parser)
    if options.counted is not None:
        check_folder(parser, options.out)
        document = json.loads(options.counted.read_text("utf-8"))
        rows = modelled_again(document)
        return report(document["environment"], rows, options.out, options.check, "cuda")
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU, torch sees none")
    if shutil.which(NCU[0]) is None:
        parser.error(f"{NCU[0]}: expected on PATH, is not there")
    check_folder(parser, options.out)
    rows = measured(options.small)
    version = subprocess.run([NCU[0], "--version"], capture_output=True, text=True).stdout.splitlines()[-1:]
    command = " ".join(["python scripts/measure_traffic.py", *(["--small"] if options.small else [])])
    machine = environment(torch.device("cuda"), command) | {"ncu": "".join(version)}
    return report(machine, rows, options.out, options.check, "cuda")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
