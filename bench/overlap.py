"""How much of the ranks' communication kernels hide.

    torchrun --nproc-per-node 2 bench/overlap.py [--quick] [--rounds N] [--out DIR]

Each kernel of a call over ranks is timed with an exchange of the call's size, one after the other and both at
once. The hidden share is the time saved, relative to the exchange.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

import torch
import torch.distributed as dist

import monoidreduce as mr
from bench.harness import Stopwatch, summary
from bench.machine import environment
from bench.report import overlap_table
from monoidreduce._command_line import (
    Parser,
    add_device,
    device_of,
    exit_with,
    replacing,
    some_path,
    whole_number,
)
from monoidreduce.distributed.group import Group

ROUNDS = 20
APART, TOGETHER = "one after the other", "together"


def kernels(device: torch.device, quick: bool) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (kernel of one of two ranks, in the sizes of bench/distributed.py; bytes exchanged)."""
    dtype = torch.bfloat16
    rows, width, columns, length = (64, 32, 48, 64) if quick else (8192, 4096, 22016, 32768)
    x, local = (torch.randn(rows, n, device=device).to(dtype) for n in (width, columns))
    q, k = (torch.randn(1, heads, length, 64 if quick else 128, device=device).to(dtype) for heads in (16, 4))
    return {
        "torch's product of the gradient of classes": (lambda: local.T @ x, 4 * x.numel()),
        "torch's product, of a quarter of the classes": (
            lambda: local[:, : columns // 4].T @ x,
            4 * x.numel(),
        ),
        "attention, forward, causal": (lambda: mr.attention(q, k, k, causal=True), q.nbytes),
    }


def measure(group: Any, device: torch.device, quick: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel. All ranks of the group call it."""
    of, watch = Group.of(group), Stopwatch(device)
    for name, (kernel, size) in kernels(device, quick).items():
        parts = torch.zeros(of.size, -(-size // of.size), dtype=torch.uint8, device=device)

        def apart(kernel: Callable[[], object] = kernel, parts: torch.Tensor = parts) -> None:
            of.start_exchange(parts, headed=False)()
            kernel()

        def together(kernel: Callable[[], object] = kernel, parts: torch.Tensor = parts) -> None:
            arrival = of.start_exchange(parts, headed=False)
            kernel()
            arrival()

        ways = {
            "kernel": kernel,
            "exchange": lambda parts=parts: of.start_exchange(parts, headed=False)(),
            APART: apart,
            TOGETHER: together,
        }
        laps: dict[str, list[float]] = {way: [] for way in ways}
        orders = random.Random(0)
        for at in range(1 + rounds):
            for way in orders.sample(list(ways), len(ways)):
                dist.barrier(group)
                watch.time(ways[way])
                slowest = torch.tensor(watch.milliseconds(), device=device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
                if at:  # the first round compiles and allocates
                    laps[way].append(float(slowest))
        times = {way: summary(found) for way, found in laps.items()}
        saved = times[APART]["median"] - times[TOGETHER]["median"]
        yield {
            "kernel": name,
            "ranks": of.size,
            "mib": parts.nbytes / 2**20,
            "milliseconds": times,
            "hidden": saved / times["exchange"]["median"],
        }


def main(argv: list[str]) -> int:
    """Measure all kernels, print their table and, with --out, write a JSON file named after the device."""
    parser = Parser(
        prog="torchrun bench/overlap.py", description="Do kernels hide what ranks send meanwhile?"
    )
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: does it run")
    parser.add_argument(
        "--rounds", type=whole_number(1, 1000), default=ROUNDS, help="of each way (%(default)s)"
    )
    parser.add_argument("--out", type=some_path, metavar="DIR", help="folder for the results")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("no rank: start it by torchrun --nproc-per-node 2")
    device = device_of(parser, options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group, first = dist.group.WORLD, dist.get_rank() == 0
    document: dict[str, Any] = {}
    if first:
        command = " ".join(
            ["torchrun", f"--nproc-per-node {dist.get_world_size()}", "bench/overlap.py", *argv]
        )
        document = {"environment": environment(device, command), "speed": [], "memory": [], "overhead": []}
    rows = list(measure(group, device, options.quick, 2 if options.quick else options.rounds))
    if first:
        document["overlap"] = rows
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9]+", "_", document["environment"]["device"].lower()).strip("_")
            with replacing(options.out / f"{name}_{device.type}_overlap.json") as whole:
                whole.write_text(json.dumps(document, indent=1) + "\n")
        print(overlap_table(rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
