"""python -m monoidreduce roofline: plot measured results under the roofline of their GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from monoidreduce._command_line import (
    Parser,
    check_environment,
    find_clone,
    plot_file,
    replacing,
    some_path,
)
from monoidreduce.theory.costs.cost import Cost, cost
from monoidreduce.theory.costs.sizes import OPERATORS, call_of
from monoidreduce.theory.hardware import HARDWARE, Hardware, find, find_gpu
from monoidreduce.theory.plan.roofline import Roofline, on_device

__all__ = ["Point", "latest", "main", "measured_roof", "peers", "points", "save_figure"]

OURS = "monoidreduce"
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Point:
    """A measured pass of a 16-bit case.

    Attributes:
        op, phase: as in the result; phase is one of `PHASES`, or "total" for both.
        intensity: FLOPs per byte of DRAM. For ours: executed FLOPs over bytes moved, both by the cost model.
        rate: these FLOPs over the measured time.
    """

    op: str
    phase: str
    intensity: float
    rate: float


def latest(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of results of `bench/run.py`, given as parsed files; for each case, the latest row."""
    found = {}
    for document in sorted(documents, key=lambda document: str(document["environment"]["date"])):
        for row in document["speed"]:
            found[row["op"], str(row["parameters"]), row["dtype"]] = row
    return [*found.values()]


def _calls(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Callable[..., Cost]]]:
    """The 16-bit rows of calls that `mr.cost` knows, each with a function that returns its cost."""
    for row in rows:
        operator = OPERATORS.get(row["op"])
        unknown = "ignored" in row["parameters"] or row["parameters"].get("loss") == "jsd"
        if operator is None or row["dtype"] not in ("bfloat16", "float16") or unknown:
            continue
        tensors, options = call_of(operator, row["parameters"], getattr(torch, row["dtype"]))
        yield row, partial(cost, operator, *tensors, **options)


def points(rows: list[dict[str, Any]], hardware: Hardware) -> Iterator[Point]:
    """Points of this library with default options. rows: measured on this GPU."""
    for row, cost_of in _calls(rows):
        passes = cost_of(hardware=hardware).passes
        for phase in PHASES:
            of_phase = [p for p in passes if p.backward == (phase == "backward")]
            flops = sum(p.flops for p in of_phase)
            moved = sum(p.dram_read + p.dram_written for p in of_phase)
            seconds = 1e-3 * row["phases"][phase]["milliseconds"][OURS]["median"]
            yield Point(row["op"], phase, flops / moved, flops / seconds)


def peers(rows: list[dict[str, Any]], hardware: Hardware) -> Iterator[Point]:
    """Points of the fastest other library, for both passes together.

    They are at useful FLOPs and compulsory bytes, because what the library executes and moves is not known.
    The passes are taken together because some libraries compute gradients in forward. rows: measured on this
    GPU.
    """
    for row, cost_of in _calls(rows):
        found, times = cost_of(hardware=hardware), row["phases"]["total"]["milliseconds"]
        others = [times[name]["median"] for name in times if not name.startswith(OURS)]
        if others:
            flops = found.useful_flops
            yield Point(row["op"], "total", flops / found.compulsory, 1e3 * flops / min(others))


def measured_roof(documents: list[dict[str, Any]]) -> Roofline:
    """The roofline from the best rates of torch's products and copies that were measured with the results."""
    machines = [document["environment"] for document in documents]
    return Roofline(
        1e9 * max(machine["product_gflops"]["bfloat16"] for machine in machines),
        1e9 * max(machine["copy_gbytes"] for machine in machines),
    )


def save_figure(
    path: Path, hardware: Hardware, measured: Roofline, found: list[Point], others: list[Point]
) -> None:
    """Draw the data sheet's and the measured roofline, with the points.

    found: this library's points, one color per operator; dots are forward, crosses backward. others: points
    of other libraries, as grey squares.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    roofs = {"data sheet": on_device(hardware), "measured": measured}
    intensities = [p.intensity for p in (*found, *others)] + [
        roof.critical_intensity for roof in roofs.values()
    ]
    least, most = min(intensities) / 2, 2 * max(intensities)
    for name, roof in roofs.items():
        ends = [least, roof.critical_intensity, most]
        axes.plot(ends, [roof.rate(x) for x in ends], color="black", linewidth=1, label=f"roof, {name}",
                  linestyle="-" if name == "measured" else "--")  # fmt: skip
    axes.plot([p.intensity for p in others], [p.rate for p in others], "s", color="0.7", markersize=4,
              label="fastest other, both")  # fmt: skip
    for index, op in enumerate(dict.fromkeys(p.op for p in found)):
        for phase, marker in zip(PHASES, "ox", strict=True):
            own = [p for p in found if (p.op, p.phase) == (op, phase)]
            axes.plot([p.intensity for p in own], [p.rate for p in own], marker, color=f"C{index}",
                      markersize=5, label=f"{op}, {phase}")  # fmt: skip
    axes.set(
        title=f"bfloat16 on {hardware.name}: executed FLOPs, useful ones of others",
        xscale="log", yscale="log",
        xlabel="FLOPs a byte of DRAM: by the model, compulsory of others", ylabel="FLOP/s, measured",
    )  # fmt: skip
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)


def _documents(parser: Parser, paths: list[Path], hardware: Hardware) -> Iterator[dict[str, Any]]:
    """The results that were measured on this GPU."""
    for path in paths:
        try:
            document = json.loads(path.read_text("utf-8"))
            device = document["environment"]["device"]
        except (KeyError, TypeError, ValueError):
            parser.error(f"argument results: {path}: expected a result of bench/run.py")
        if find_gpu(device) is hardware and document["speed"]:
            yield document


def main(argv: list[str]) -> int:
    """Draw the figure; return the exit status. argv: arguments after `python -m monoidreduce roofline`."""
    parser = Parser(
        prog="python -m monoidreduce roofline",
        description="Draws results of bench/run.py under the roofs of their GPU, of 16-bit cases.",
    )
    parser.add_argument(
        "results", nargs="*", type=some_path, metavar="RESULT",
        help="as bench/results/*.json (default: these, in a clone)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", choices=[name for name, gpu in HARDWARE.items() if gpu.capability], default="h100",
        help="only results on this GPU are drawn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--plot", type=plot_file, required=True, metavar="FILE", help="needs matplotlib"
    )
    options = parser.parse_args(argv)
    check_environment(parser)
    hardware, clone = find(options.hardware), find_clone()
    if not options.results and clone is None:
        parser.error("argument results: expected some, for this is no clone of monoidreduce")
    committed = [] if clone is None else sorted((clone / "bench" / "results").glob("*.json"))
    documents = [*_documents(parser, options.results or committed, hardware)]
    rows = latest(documents)
    found = [*points(rows, hardware)]
    if not found:
        parser.error(f"argument results: expected 16-bit cases on {hardware.name}, got none")
    try:
        save_figure(options.plot, hardware, measured_roof(documents), found, [*peers(rows, hardware)])
    except ImportError:
        parser.error("argument --plot: matplotlib is not installed: pip install matplotlib")
    print(f"{options.plot}: {len(found)} points")
    return 0
