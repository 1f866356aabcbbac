"""python -m monoidreduce cost: prints what a call of an operator costs."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from monoidreduce._command_line import Parser, check_environment, whole_number
from monoidreduce.costs.cost import cost
from monoidreduce.hardware import HARDWARE
from monoidreduce.workspace import get_workspace, workspace

__all__ = ["main"]

# By operator: its sizes, and the options that may follow them.
SIZES = {
    "attention": ("B H L d", "Hkv N causal window softcap"),
    "linear_cross_entropy": ("N V D", ""),
    "linear_distillation": ("N V D E", ""),
    "mlp": ("B K d", ""),
    "logsumexp_matmul": ("M N F", ""),
}
MOST = 1 << 40
GPUS = [name for name, hardware in HARDWARE.items() if hardware.capability]
DTYPES = ("bfloat16", "float16", "float32", "float64")


def size(text: str) -> tuple[str, float]:
    """The type of a size: NAME=NUMBER, or a name alone for one that is on."""
    name, given, number = text.partition("=")
    if not given:
        return name, 1
    with suppress(ValueError):
        if 0 < (value := float(number)) <= MOST:
            return name, value
    raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=NUMBER with a number above 0")


def call_of(operator: str, p: dict[str, float], dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a call of these sizes, without memory, and its options."""

    def t(*shape: float, of: torch.dtype = dtype) -> Tensor:
        return torch.empty([int(n) for n in shape], dtype=of, device="meta")

    if operator == "attention":
        heads, keys = p.get("Hkv", p["H"]), p.get("N", p["L"])
        options: dict[str, Any] = {"causal": "causal" in p, "softcap": p.get("softcap")}
        if "window" in p:
            options["window"] = (int(p["window"]), int(p["window"]))
        k, v = (t(p["B"], heads, keys, p["d"]) for _ in range(2))
        return [t(p["B"], p["H"], p["L"], p["d"]), k, v], options
    if operator == "mlp":
        return [t(p["B"], p["d"]), t(p["K"], p["d"]), t(p["d"], p["K"])], {}
    if operator == "logsumexp_matmul":
        return [t(p["M"], p["F"]), t(p["N"], p["F"])], {}
    tensors = [t(p["N"], p["D"]), t(p["V"], p["D"])]
    if operator == "linear_cross_entropy":
        return [*tensors, t(p["N"], of=torch.int64)], {}
    return [*tensors, t(p["N"], p["E"]), t(p["V"], p["E"])], {}


def main(argv: list[str]) -> int:
    """Prints the table and returns the exit status; `argv` is what follows `python -m monoidreduce cost`."""
    described = "; ".join(f"{name}: {' '.join(names).strip()}" for name, names in SIZES.items())
    parser = Parser(
        prog="python -m monoidreduce cost",
        description="What a call and its backward pass cost on a GPU that need not be there.",
        epilog=f"Sizes and options, the latter from Hkv on, as in bench/results. {described}.",
    )
    parser.add_argument("operator", choices=SIZES)
    parser.add_argument("sizes", nargs="+", type=size, metavar="NAME=NUMBER", help="or NAME, as in causal")
    parser.add_argument("--hardware", choices=GPUS, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--workspace", type=whole_number(0, MOST), default=get_workspace(), help="bytes (%(default)s)"
    )
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    check_environment(parser)
    needed, optional = (names.split() for names in SIZES[options.operator])
    given = dict(options.sizes)
    for name in given:
        if name not in (*needed, *optional):
            parser.error(f"argument sizes: {name}: expected one of {', '.join((*needed, *optional))}")
    if missing := [name for name in needed if name not in given]:
        parser.error(f"argument sizes: expected {', '.join(missing)} too")
    tensors, keywords = call_of(options.operator, given, getattr(torch, options.dtype))
    wanted = () if options.forward else None
    try:
        with workspace(options.workspace):
            found = cost(options.operator, *tensors, hardware=options.hardware, needed=wanted, **keywords)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(found.to_json() if options.json else found)
    return 0
