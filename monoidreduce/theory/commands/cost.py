"""python -m monoidreduce cost: print the predicted cost of a call of an operator."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from monoidreduce._command_line import Parser, check_environment, positive_number, whole_number
from monoidreduce.theory.costs.cost import cost
from monoidreduce.theory.costs.sizes import SIZES, call_of
from monoidreduce.theory.hardware import CPU, HARDWARE
from monoidreduce.theory.plan import splits
from monoidreduce.workspace import get_workspace, workspace

__all__ = ["main"]

MOST = 1 << 40
FLAGS = ("causal", "bias", "gated")
GPUS = [name for name, hardware in HARDWARE.items() if hardware.capability]
DTYPES = ("bfloat16", "float16", "float32", "float64")


def size(text: str) -> tuple[str, Any]:
    """Parse a size: NAME=NUMBER, or the name alone for an option that is on."""
    name, given, number = text.partition("=")
    if not given:
        return name, True
    if name in ("loss", "dtype"):
        return name, number
    convert = positive_number if name == "softcap" else whole_number(1, MOST)
    return name, convert(number)


def device(text: str) -> str:
    """Parse --hardware: a known device, or a file that calibrate wrote."""
    if text in (*GPUS, CPU.name) or text.endswith(".json"):
        return text
    expected = f"one of {', '.join((*GPUS, CPU.name))}, or a file of calibrate --out, as rates.json"
    raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")


def main(argv: list[str]) -> int:
    """Print the table; return the exit status. argv: arguments after `python -m monoidreduce cost`."""
    described = "; ".join(f"{name}: {' '.join(names).strip()}" for name, names in SIZES.items())
    parser = Parser(
        prog="python -m monoidreduce cost",
        description="What a call and its backward pass cost on a GPU that need not be there, or on a CPU.",
        epilog=f"Sizes and options, the latter from Hkv on, as in bench/results. {described}.",
    )
    parser.add_argument("operator", choices=SIZES)
    parser.add_argument("sizes", nargs="+", type=size, metavar="NAME=NUMBER", help="or NAME, as in causal")
    parser.add_argument(
        "--hardware", type=device, required=True, metavar="NAME",
        help=f"{', '.join((*GPUS, CPU.name))}, or a file that calibrate --out wrote, as rates.json",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="or dtype=NAME among the sizes (default: bfloat16)")
    parser.add_argument(
        "--workspace", type=whole_number(0, MOST), default=get_workspace(), help="bytes (%(default)s)"
    )
    parser.add_argument(
        "--ranks",
        type=whole_number(2, MOST),
        help="compare the ways to split the call, with gradients, over so many GPUs",
    )
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    check_environment(parser)
    needed, optional = (names.split() for names in SIZES[options.operator])
    given = dict(options.sizes)
    named = given.pop("dtype", None)
    if named is not None and named not in DTYPES:
        parser.error(f"argument sizes: dtype: expected one of {', '.join(DTYPES)}")
    if named is not None and options.dtype is not None:
        parser.error(f"argument --dtype: expected it or dtype={named}")
    for name in given:
        if name not in (*needed, *optional):
            parser.error(f"argument sizes: {name}: expected one of {', '.join((*needed, *optional))}")
    if missing := [name for name in needed if name not in given]:
        parser.error(f"argument sizes: expected {', '.join(missing)} too")
    for name, value in given.items():
        if (value is True) != (name in FLAGS):
            parser.error(f"argument sizes: {name}: expected {name if name in FLAGS else f'{name}=NUMBER'}")
    if options.ranks and (options.forward or options.json):
        parser.error("argument --ranks: expected neither --forward nor --json beside it")
    dtype = getattr(torch, named or options.dtype or "bfloat16")
    wanted = () if options.forward else None
    try:
        with workspace(options.workspace):
            if options.ranks:
                ways = splits(options.operator, given, options.ranks, options.hardware, dtype=dtype)
                print("\n\n".join(map(str, ways)))
                return 0
            tensors, keywords = call_of(options.operator, given, dtype)
            found = cost(options.operator, *tensors, hardware=options.hardware, needed=wanted, **keywords)
    except OSError as error:
        parser.error(f"argument --hardware: {error.filename}: {error.strerror}")
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(found.to_json() if options.json else found)
    return 0
