"""python -m monoidreduce plan: the plan of a mesh, meshes for a number of chips, or published runs."""

from __future__ import annotations

import argparse
import json
import re

from monoidreduce._command_line import Parser, plot_file, positive_number, whole_number
from monoidreduce.theory.hardware import HARDWARE, NETWORKS
from monoidreduce.theory.plan.figure import save_figure
from monoidreduce.theory.plan.layer import RECOMPUTE
from monoidreduce.theory.plan.mesh import STRATEGIES, Axis, Mesh
from monoidreduce.theory.plan.models import MODELS, find_model
from monoidreduce.theory.plan.pipeline import SCHEDULES
from monoidreduce.theory.plan.planner import OVERLAP, Batch, Plan, Precision
from monoidreduce.theory.plan.published import RUNS
from monoidreduce.theory.plan.report import as_dict
from monoidreduce.theory.plan.runs import table_of_runs
from monoidreduce.theory.plan.search import best, plans, propose

__all__ = ["main"]

MOST_CHIPS = 10**6
SHOWN = 8  # number of meshes that a comparison prints
ENTRY = re.compile(r"(?P<strategy>\w+)(=(?P<size>\w+))?(:(?P<links>[\w.-]+))?")


def mesh_axes(text: str) -> list[tuple[str, int | None, float | str]]:
    """Parse --mesh: for each strategy its size (None if not given) and its links."""
    axes: list[tuple[str, int | None, float | str]] = []
    for entry in text.split(","):
        found = ENTRY.fullmatch(entry)
        if (
            not found
            or found["strategy"] not in STRATEGIES
            or found["strategy"] in [name for name, *_ in axes]
        ):
            expected = f"STRATEGY[=SIZE][:LINKS],... with each of {', '.join(STRATEGIES)} at most once"
            raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
        size = whole_number(1, MOST_CHIPS)(found["size"]) if found["size"] else None
        links = found["links"] or "1"
        axes.append((found["strategy"], size, links if links in NETWORKS else positive_number(links)))
    return axes


def strategies(text: str) -> tuple[str, ...]:
    """Parse --overlap."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"{name!r}, expected some of {', '.join(STRATEGIES)}")
    return names


def _parser() -> Parser:
    parser = Parser(
        prog="python -m monoidreduce plan",
        description="Time and memory of a training step on a mesh of chips.",
    )
    parser.add_argument(
        "--runs", action="store_true", help="published runs, and what the planner says of them"
    )
    parser.add_argument("--hardware", choices=HARDWARE)
    parser.add_argument("--model", help=f"a config.json, or one of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=positive_number, help="tokens of a step")
    parser.add_argument(
        "--sequence", type=positive_number, default=4096, help="tokens of a sequence (%(default)s)"
    )
    parser.add_argument("--microbatch", type=positive_number, help="sequences of a replica in a forward pass")
    parser.add_argument(
        "--mesh",
        type=mesh_axes,
        metavar="STRATEGY[=SIZE][:LINKS],...",
        help=f"chips of each of {', '.join(STRATEGIES)}, those of the last lie together; LINKS are a torus's "
        "axes, or a network; without sizes, all meshes are compared; without --mesh, some are proposed",
    )
    parser.add_argument("--chips", type=whole_number(1, MOST_CHIPS), help="where --mesh has no sizes")
    parser.add_argument("--network", choices=NETWORKS, help="between nodes")
    parser.add_argument("--tokens", type=positive_number, help="of the whole training")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none", help="in backward (%(default)s)")
    parser.add_argument("--float8", action="store_true", help="products of layers in 8 bits")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0, help="what replicas share")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of stages (%(default)s)")
    parser.add_argument("--chunks", type=whole_number(1, 1000), default=1, help="of a stage, interleaved")
    parser.add_argument(
        "--overlap",
        type=strategies,
        default=OVERLAP,
        metavar="STRATEGY,...",
        help=f"whose collectives run beside arithmetic ({','.join(OVERLAP)})",
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="chips of tp repeat norms and residuals"
    )
    parser.add_argument(
        "--cost",
        action="store_true",
        help="attention, feedforward layers and the loss are this library's and take what mr.cost says",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help="draw the parts of a step of each mesh; needs matplotlib",
    )
    return parser


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.runs:
        print(table_of_runs(RUNS))
        return 0
    missing = [f"--{name}" for name in ("hardware", "model", "batch") if getattr(options, name) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    sizes = [size for _, size, _ in options.mesh or ()]
    if options.chips and any(sizes):
        parser.error("argument --chips: expected only if --mesh has no sizes")
    if not options.chips and not (sizes and all(sizes)):
        parser.error("argument --mesh: expected the sizes of all strategies, or none and --chips")
    hardware = HARDWARE[options.hardware]
    how = dict(
        precision=Precision(float8=options.float8),
        schedule=options.schedule,
        overlap=options.overlap,
        sequence_parallel=not options.no_sequence_parallel,
        cost=options.cost,
    )
    fixed = dict(recompute=options.recompute, zero=options.zero, chunks=options.chunks)
    why: tuple[str, ...] = ()
    try:
        model = find_model(options.model)
        batch = Batch(options.batch, options.sequence, options.microbatch)
        axes = tuple(Axis(name, size or 1, links) for name, size, links in options.mesh or ())
        if not options.chips:
            found = [Plan(model, batch, Mesh(hardware, axes, options.network), **how, **fixed)]
            plan = found[0]
        elif axes:
            found = plans(
                model, batch, hardware, options.chips, axes, network=options.network, **how, **fixed
            )
            plan = best(found)
        else:
            proposals = propose(model, batch, hardware, options.chips, network=options.network, **how)
            found, plan, why = list(proposals.plans), proposals.best, proposals.why
        if options.plot:
            save_figure(options.plot, found[:SHOWN])
    except ValueError as error:
        parser.error(str(error))
    except ImportError:
        parser.error("argument --plot: matplotlib is not installed: pip install matplotlib")
    if options.json:
        printed = as_dict(plan) | {"model": options.model, "parameters": model.parameters}
        if options.chips:
            printed |= {"why": list(why), "others": [as_dict(other) for other in found if other is not plan]}
        print(json.dumps(printed, indent=2))
        return 0
    if options.chips:
        _compare(found)
    print(f"{options.model}, {model.parameters:.4g} parameters, on {plan}")
    for line in why:
        print(f"why                 {line}")
    if options.tokens:
        print(f"training            {options.tokens:.3g} tokens in {plan.days(options.tokens):.1f} days")
    return 0


def _compare(found: list[Plan]) -> None:
    names = list(dict.fromkeys(axis.strategy for plan in found for axis in plan.mesh.axes))
    print("".join(f"{name:>10}" for name in names) + f"{'recompute':>11}{'step':>11}{'MFU':>7}{'memory':>13}")
    for plan in found[:SHOWN]:
        sizes = "".join(f"{plan.mesh.size(name):>10}" for name in names)
        numbers = f"{plan.step_seconds:>9.3g} s{plan.mfu:>7.1%}{f'{plan.memory.total:.3g} B':>13}"
        print(f"{sizes}{plan.recompute:>11}{numbers}")
    print()
