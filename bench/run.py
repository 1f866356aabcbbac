"""The one command: `python bench/run.py [what ...] [--device cpu|cuda] [--quick] [--out DIR]`."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository comes last, where its folder monoidreduce/ does not hide an installed package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

import torch

from bench.harness import time_case
from bench.machine import environment
from bench.memory import measure_memory
from bench.overhead import measure_overhead
from bench.report import tables

OPERATORS = ("attention", "cross_entropy", "distillation", "mlp", "logsumexp")
OTHERS = ("memory", "overhead")
SECONDS = 8.0  # for each case


def bench(what: list[str], device: torch.device, quick: bool, seconds: float, command: str) -> dict[str, Any]:
    """The results of everything in `what`, with the machine they come from."""
    document: dict[str, Any] = {
        "environment": environment(device, command),
        "speed": [],
        "memory": [],
        "overhead": [],
    }
    for op in (name for name in OPERATORS if name in what):
        for case in importlib.import_module(f"bench.{op}").cases(device, quick):
            row = time_case(case, 0.0 if quick else seconds)
            ratios = ", ".join(
                f"{name} {phase['speedup']['torch']:.2f}x" for name, phase in row["phases"].items()
            )
            print(f"{op} {case.parameters} {row['dtype']}: {ratios}", file=sys.stderr)
            document["speed"].append(row)
    if "memory" in what:
        document["memory"] = measure_memory(device, quick)
    if "overhead" in what:
        print("measuring call overhead", file=sys.stderr)
        document["overhead"] = measure_overhead(device)
    return document


def main(argv: list[str]) -> int:
    """Runs what is asked for, prints the tables and, with --out, writes a JSON named after the device."""
    parser = argparse.ArgumentParser(prog="python bench/run.py", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(OPERATORS + OTHERS)} (default: all)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds: does it run; no targets"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results, as bench/results")
    options = parser.parse_args(argv)
    unknown = set(options.what) - set(OPERATORS + OTHERS)
    if unknown:
        parser.error(f"what: {', '.join(sorted(unknown))}, expected any of {', '.join(OPERATORS + OTHERS)}")
    device = torch.device(options.device)
    # Where the results go is no part of how they came about.
    said = " ".join(["python bench/run.py", *argv])
    command = said if options.out is None else said.replace(f" --out {options.out}", "")
    document = bench(
        options.what or list(OPERATORS + OTHERS), device, options.quick, options.seconds, command
    )
    print(tables(document))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "_", document["environment"]["device"].lower()).strip("_")
        file = options.out / f"{name}_{options.device}.json"
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nresults: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
