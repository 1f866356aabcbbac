"""python -m monoidreduce roofline: what was measured, under the roofs of its device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monoidreduce._command_line import Parser, check_environment, plot_file, replacing, some_path
from monoidreduce.costs.cost import cost
from monoidreduce.costs.sizes import OPERATORS, call_of
from monoidreduce.hardware import HARDWARE, Hardware, find, find_gpu
from monoidreduce.plan.roofline import Roofline, on_device

__all__ = ["Point", "main", "points", "save_figure"]

OURS = "monoidreduce"


@dataclass(frozen=True)
class Point:
    """A contender's forward and backward pass of a case of 16 bits.

    The two are one point, because some libraries compute gradients of losses in the forward pass.

    Attributes:
        contender, op: as a result names them.
        intensity: useful FLOPs a compulsory byte, the same for all contenders of a case.
        rate: useful FLOP/s that were measured.
    """

    contender: str
    op: str
    intensity: float
    rate: float


def points(document: dict[str, Any], hardware: Hardware) -> Iterator[Point]:
    """Those of a result of `bench/run.py`, of operators that `mr.cost` knows.

    document: as it is in a file. hardware: a GPU; which does not change intensities.
    """
    for row in document["speed"]:
        operator = OPERATORS.get(row["op"])
        if operator is None or row["dtype"] not in ("bfloat16", "float16") or "ignored" in row["parameters"]:
            continue
        tensors, options = call_of(operator, row["parameters"], getattr(torch, row["dtype"]))
        moved = cost(operator, *tensors, hardware=hardware, **options).compulsory
        phase = row["phases"]["total"]
        flops = phase["gflops"] * 1e6 * phase["milliseconds"][OURS]["median"]
        for contender, milliseconds in phase["milliseconds"].items():
            yield Point(contender, row["op"], flops / moved, flops / (1e-3 * milliseconds["median"]))


def save_figure(path: Path, hardware: Hardware, found: list[Point]) -> None:
    """Draws the roofs of the data sheet and of what was measured, ours as dots and others as crosses.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    roofs = {"data sheet": on_device(hardware)}
    if hardware.measured is not None:
        roofs["measured"] = Roofline(hardware.measured.peak, hardware.measured.bandwidth)
    most = 2 * max([p.intensity for p in found] + [roof.critical_intensity for roof in roofs.values()])
    for name, roof in roofs.items():
        ends = [1.0, roof.critical_intensity, most]
        axes.plot(ends, [roof.rate(x) for x in ends], color="black", linewidth=1, label=f"roof, {name}",
                  linestyle="-" if name == "measured" else "--")  # fmt: skip
    for index, op in enumerate(dict.fromkeys(p.op for p in found)):
        for ours, marker in ((False, "x"), (True, "o")):
            own = [p for p in found if p.op == op and (p.contender == OURS) == ours]
            label = f"{op}, {'monoidreduce' if ours else 'others'}"
            axes.plot([p.intensity for p in own], [p.rate for p in own], marker, color=f"C{index}",
                      markersize=6 if ours else 4, alpha=1.0 if ours else 0.5, label=label)  # fmt: skip
    axes.set(
        xscale="log", yscale="log", title=f"bfloat16 on {hardware.name}",
        xlabel="useful FLOPs a compulsory byte", ylabel="useful FLOP/s",
    )  # fmt: skip
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)


def main(argv: list[str]) -> int:
    """Draws the figure and returns the exit status; `argv` follows `python -m monoidreduce roofline`."""
    parser = Parser(
        prog="python -m monoidreduce roofline",
        description="Draws results of bench/run.py under the roofs of their GPU, of 16-bit cases.",
    )
    parser.add_argument(
        "results", nargs="+", type=some_path, metavar="RESULT", help="as bench/results/*.json"
    )
    parser.add_argument(
        "--hardware", choices=[name for name, gpu in HARDWARE.items() if gpu.capability], default="h100",
        help="only results on this GPU are drawn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--plot", type=plot_file, required=True, metavar="FILE", help="needs matplotlib")
    options = parser.parse_args(argv)
    check_environment(parser)
    hardware = find(options.hardware)
    found: list[Point] = []
    for path in options.results:
        try:
            document = json.loads(path.read_text("utf-8"))
            device = document["environment"]["device"]
        except (KeyError, TypeError, ValueError):
            parser.error(f"argument results: {path}: expected a result of bench/run.py")
        if find_gpu(device) is hardware:
            found += points(document, hardware)
    if not found:
        parser.error(f"argument results: expected 16-bit cases on {hardware.name}, got none")
    try:
        save_figure(options.plot, hardware, found)
    except ImportError:
        parser.error("argument --plot: matplotlib is not installed: pip install matplotlib")
    print(f"{options.plot}: {len(found)} points")
    return 0
