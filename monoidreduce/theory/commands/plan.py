"""python -m monoidreduce plan: print the plan of a mesh, or compare all meshes of a number of chips."""

from __future__ import annotations

import argparse
import re

from monoidreduce._command_line import Parser, plot_file, positive_number, whole_number
from monoidreduce.theory.hardware import HARDWARE
from monoidreduce.theory.plan.figure import save_figure
from monoidreduce.theory.plan.mesh import STRATEGIES, Axis, Mesh
from monoidreduce.theory.plan.planner import Batch, Plan, best, plans
from monoidreduce.theory.plan.transformer import MODELS

__all__ = ["main"]

MOST_CHIPS = 10**6
SHOWN = 8  # number of meshes that a comparison prints
ENTRY = re.compile(r"(?P<strategy>\w+)(=(?P<size>\w+))?(:(?P<links>[\w.]+))?")


def mesh_axes(text: str) -> dict[str, tuple[int | None, float]]:
    """Parse --mesh: for each strategy its size (None if not given) and its number of physical axes."""
    axes: dict[str, tuple[int | None, float]] = {}
    for entry in text.split(","):
        found = ENTRY.fullmatch(entry)
        if not found or found["strategy"] not in STRATEGIES or found["strategy"] in axes:
            expected = f"STRATEGY[=SIZE][:AXES],... with each of {', '.join(STRATEGIES)} at most once"
            raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
        size = whole_number(1, MOST_CHIPS)(found["size"]) if found["size"] else None
        axes[found["strategy"]] = size, positive_number(found["links"]) if found["links"] else 1
    return axes


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m monoidreduce plan", description="Time and memory of a training step.")
    parser.add_argument("--hardware", choices=HARDWARE, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--batch", type=positive_number, required=True, help="tokens of a step")
    parser.add_argument(
        "--sequence", type=positive_number, default=4096, help="tokens of a sequence (%(default)s)"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_axes,
        required=True,
        metavar="STRATEGY[=SIZE][:AXES],...",
        help=f"chips and physical axes of each of {', '.join(STRATEGIES)}; without sizes, all are compared",
    )
    parser.add_argument("--chips", type=whole_number(1, MOST_CHIPS), help="where --mesh has no sizes")
    parser.add_argument("--tokens", type=positive_number, help="of the whole training")
    parser.add_argument(
        "--mfu", type=positive_number, default=1, help="of the arithmetic by itself (%(default)s)"
    )
    parser.add_argument(
        "--cost",
        action="store_true",
        help="attention, feedforward layers and the loss take what mr.cost says, other products by --mfu",
    )
    parser.add_argument("--remat", action="store_true", help="layers run again in backward")
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help="draw what arithmetic and each strategy's links take, of each mesh; needs matplotlib",
    )
    options = parser.parse_args(argv)

    sizes = [size for size, _ in options.mesh.values()]
    if options.chips and any(sizes):
        parser.error("argument --chips: expected only if --mesh has no sizes")
    if not options.chips and not all(sizes):
        parser.error("argument --mesh: expected the sizes of all strategies, or none and --chips")
    how = {"mfu": options.mfu, "remat": options.remat, "cost": options.cost}
    model, hardware = MODELS[options.model], HARDWARE[options.hardware]
    try:
        batch = Batch(options.batch, options.sequence)
        if options.chips:
            links = {name: axes for name, (_, axes) in options.mesh.items()}
            found = plans(model, batch, hardware, options.chips, links, **how)
            plan = best(found)
        else:
            axes = tuple(Axis(name, size, links) for name, (size, links) in options.mesh.items())
            plan = Plan(model, batch, Mesh(hardware, axes), **how)
            found = [plan]
        if options.plot:
            save_figure(options.plot, found[:SHOWN])
    except ValueError as error:
        parser.error(str(error))
    except ImportError:
        parser.error("argument --plot: matplotlib is not installed: pip install matplotlib")
    if options.chips:
        _compare(found)
    print(f"{options.model}, {model.parameters:.4g} parameters, on {plan}")
    if options.tokens:
        print(f"training  {options.tokens:.3g} tokens in {plan.days(options.tokens):.1f} days")
    return 0


def _compare(found: list[Plan]) -> None:
    strategies = [axis.strategy for axis in found[0].mesh.axes]
    print("".join(f"{name:>8}" for name in strategies) + f"{'step':>11}{'links':>11}{'memory':>13}")
    for plan in found[:SHOWN]:
        sizes = "".join(f"{axis.size:>8}" for axis in plan.mesh.axes)
        step, links = f"{plan.step_seconds:.3f} s", f"{plan.communication_seconds:.3f} s"
        print(f"{sizes}{step:>11}{links:>11}{f'{plan.memory.total:.3g} B':>13}")
    print()
