"""The one command: `python bench/run.py [what ...] [--device cpu|cuda] [--quick] [--out DIR]`."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # for Ctrl-C during imports
        signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import torch

from bench.accuracy import measure_accuracy
from bench.decode import measure_decode
from bench.derivatives import measure_derivatives
from bench.first_call import measure_first_call
from bench.fold_kernels import measure_fold_kernels
from bench.forward import measure_forward
from bench.harness import time_case
from bench.heads import measure_heads
from bench.interpreter import measure_interpreter
from bench.machine import environment
from bench.memory import measure_memory
from bench.models import measure_models
from bench.overhead import measure_over_ranks, measure_overhead, silent_group
from bench.plot import save_plot
from bench.report import tables
from monoidreduce._command_line import (
    Parser,
    add_device,
    check_environment,
    check_writable_folder,
    device_of,
    exit_with,
    plot_file,
    positive_number,
    replacing,
    some_path,
)

OPERATORS = (
    "attention",
    "attention_options",
    "attention_varlen",
    "attention_wide",
    "cross_entropy",
    "distillation",
    "log_probs",
    "mlp",
    "logsumexp",
    "folds",
    "mods",
    "kernel_sums",
    "payloads",
    "captured",
    "user_losses",
    "short",
)
OTHERS = (
    "decode",
    "forward",
    "derivatives",
    "heads",
    "accuracy",
    "memory",
    "overhead",
    "first_call",
    "interpreter",
    "fold_kernels",
    "models",
)
SECONDS = 8.0  # for each case


def bench(
    what: list[str], device: torch.device, quick: bool, seconds: float, command: str
) -> Iterator[dict[str, Any]]:
    """Measure everything in `what`. Yields the document of results so far whenever there are more."""
    document: dict[str, Any] = {"environment": environment(device, command), "speed": []}
    document |= {name: [] for name in OTHERS}
    chosen = dict(name.partition(":")[::2] for name in what)
    for op in (name for name in OPERATORS if name in chosen):
        cases = importlib.import_module(f"bench.{op}").cases(device, quick)
        for case in [cases[int(n)] for n in chosen[op].split(",")] if chosen[op] else cases:
            row = time_case(case, 0.0 if quick else seconds)
            ratios = ", ".join(
                f"{name} {phase['speedup']['torch']:.2f}x" for name, phase in row["phases"].items()
            )
            print(f"{case}: {ratios}", file=sys.stderr)
            document["speed"].append(row)
            yield document
    if "decode" in what:
        document["decode"] = measure_decode(device, quick)
        yield document
    if "forward" in what:
        document["forward"] = measure_forward(device, quick)
    if "derivatives" in what:
        document["derivatives"] = measure_derivatives(device, quick)
        yield document
    if "heads" in what:
        document["heads"] = measure_heads(device, quick)
        yield document
    if "accuracy" in what:
        document["accuracy"] = measure_accuracy(device, quick)
        yield document
    if "memory" in what:
        document["memory"] = measure_memory(device, quick)
        yield document
    if "overhead" in what:
        print("measuring call overhead", file=sys.stderr)
        document["overhead"] = measure_overhead(device)
        yield document
        with silent_group() as group:
            document["host"] = measure_over_ranks(device, group)
        yield document
    if "first_call" in what:
        document["first_call"] = measure_first_call(device, quick, what)
        yield document
    if "interpreter" in what:
        document["interpreter"] = measure_interpreter(device, quick)
        yield document
    if "fold_kernels" in what:
        document["fold_kernels"] = measure_fold_kernels(device, quick)
        yield document
    if "models" in what:
        for row in measure_models(device, quick):
            document["models"].append(row)
            yield document


def main(argv: list[str]) -> int:
    """Run what is asked for, print the tables, draw the plots and, with --out, write a JSON file.

    The file is named after the device. It is written whenever there are more results, so that a run that is
    cut short leaves those it has.
    """
    places = Parser(add_help=False)
    places.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        default="monoidreduce_bench.png",
        help="default: %(default)s",
    )
    places.add_argument(
        "--out", type=some_path, metavar="DIR", help="folder for the results, as bench/results"
    )
    parser = Parser(prog="python bench/run.py", description=__doc__, parents=[places])
    parser.add_argument(
        "what",
        nargs="*",
        help=f"any of {', '.join(OPERATORS + OTHERS)} (default: all); op:0,2 for some of an operator's cases",
    )
    add_device(parser)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds: does it run; no targets"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=SECONDS, help="for each case (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    some = re.compile(rf"({'|'.join(OPERATORS)}):\d+(,\d+)*")
    unknown = {name for name in options.what if not some.fullmatch(name)} - set(OPERATORS + OTHERS)
    if unknown:
        parser.error(f"what: {', '.join(sorted(unknown))}, expected any of {', '.join(OPERATORS + OTHERS)}")
    check_environment(parser)
    device = device_of(parser, options.device)
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            check_writable_folder(options.out)
        except OSError as error:
            parser.error(f"argument --out: {str(options.out)!r}, cannot be written: {error.strerror}")
    # Without the options that say where results go, which do not affect them.
    command = " ".join(["python bench/run.py", *places.parse_known_args(argv)[1]])
    file = None
    for document in bench(
        options.what or list(OPERATORS + OTHERS), device, options.quick, options.seconds, command
    ):
        if options.out is not None:
            name = re.sub(r"[^a-z0-9]+", "_", document["environment"]["device"].lower()).strip("_")
            file = options.out / f"{name}_{device.type}.json"
            with replacing(file) as whole:
                whole.write_text(json.dumps(document, indent=1) + "\n")
    print(tables(document))
    if file is not None:
        print(f"\nresults: {file}")
    try:
        if save_plot(options.plot, document):
            print(f"\nplot: {options.plot}")
    except ImportError:
        print("\nno plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
