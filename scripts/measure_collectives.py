"""Times the collectives of Table 2 between ranks, and compares them with the planner's formulas.

    torchrun --nproc-per-node 2 scripts/measure_collectives.py [--mib 64 ...] [--check] [--out bench/results]
    torchrun --nproc-per-node 3 scripts/measure_collectives.py --count

The planner's links have a latency and a rate. Both are fitted to the all-gathers; the other three collectives
are held to what `monoidreduce.plan` then says of them. NCCL runs them on GPUs, gloo on a CPU.

--count times nothing: it plays the collectives as rings over gloo, and counts the bytes of each send.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from counted_rings import counted
from torch import Tensor

from bench.harness import Stopwatch, summary
from bench.machine import environment
from bench.report import COLLECTIVE_TOLERANCE, LEAST_MIB, Row, met_collective, table, tables
from bench.traffic import check_folder
from monoidreduce._command_line import (
    Parser,
    add_device,
    device_of,
    exit_with,
    replacing,
    some_path,
    whole_number,
)
from monoidreduce.hardware import HARDWARE, Link
from monoidreduce.theory.plan.links import Group, Send

FITTED = "all-gather"
NO_LINK = Link(rate=1.0, latency=0.0, source="none yet")  # only the bytes sent over it count
SIZES = (64, 128, 256, 512, 1024)  # MiB
COUNTED = (1 << 20, (1 << 20) + 1)  # elements of objects whose bytes are counted; one has no even parts
CALLS = 5  # one after the other, so that ranks that begin apart do not count
ROUNDS = 20
# torch 2.13 has other names for these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collectives(whole: Tensor, own: Tensor, group: Any) -> dict[str, Callable[[], object]]:
    """Each collective of an object [elements]: whole on every rank, and own, a rank's part of it."""
    found = torch.empty_like(own)
    return {
        "all-gather": lambda: _all_gather(whole, own, group=group),
        "reduce-scatter": lambda: _reduce_scatter(own, whole, group=group),
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(found, own, group=group),
    }


def sends(link: Link, ranks: int, bytes: int) -> dict[str, Send]:
    """What the planner says of each collective of an object of so many bytes, over links like this one."""
    hardware = replace(HARDWARE["h200"], joined=ranks, within=link, between=link)
    group = Group.of(ranks, hardware, torch.float32)
    # A reduce-scatter is an all-gather backwards; in an all-to-all each rank's part has one for every other.
    return {
        "all-gather": group.gather("object", bytes),
        "reduce-scatter": group.gather("object", bytes),
        "all-reduce": group.all_reduce("object", bytes),
        "all-to-all": group.exchange("object", bytes / ranks),
    }


def fitted(sent: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in seconds and rate in bytes/s of the line through these, by the least relative errors.

    A latency below 0, which noise may give, becomes 0.
    """
    of_one, of_bytes = (torch.tensor(of, dtype=torch.float64) for of in ([1 / t for t in seconds], sent))
    of_bytes = of_bytes * of_one
    ones = torch.ones_like(of_one)
    latency, per_byte = torch.linalg.lstsq(torch.stack([of_one, of_bytes], 1), ones).solution.tolist()
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, float(of_bytes.sum() / of_bytes.square().sum())
    return latency, 1 / per_byte


def time_each(group: Any, device: torch.device, mib: int, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """The bytes of the object, and milliseconds of a call of each collective on the slowest rank."""
    ranks, watch = dist.get_world_size(group), Stopwatch(device)
    part = -(-(mib << 20) // (4 * ranks**2)) * ranks  # elements of a rank's part, as many for each rank
    whole, own = torch.zeros(ranks * part, device=device), torch.zeros(part, device=device)
    laps: dict[str, list[float]] = {}
    for name, call in collectives(whole, own, group).items():
        call()
        laps[name] = []
        for _ in range(rounds):
            dist.barrier(group)
            watch.time(lambda call=call: [call() for _ in range(CALLS)])
            slowest = torch.tensor(watch.milliseconds(), device=device) / CALLS
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
            laps[name].append(float(slowest))
    return whole.nbytes, laps


def measure(
    group: Any, device: torch.device, sizes: Sequence[int], rounds: int
) -> tuple[dict[str, float], Iterator[Row]]:
    """The link that was fitted, and a row for each size and collective. All ranks of the group call it.

    sizes: MiB of the objects, two or more.
    """
    ranks = dist.get_world_size(group)
    found = [time_each(group, device, mib, rounds) for mib in sizes]
    sent = [sends(NO_LINK, ranks, bytes)[FITTED].bytes for bytes, _ in found]
    seconds = [summary(laps[FITTED])["median"] / 1e3 for _, laps in found]
    latency, rate = fitted(sent, seconds)
    link = Link(rate, latency, f"fitted to {FITTED}s")

    def rows() -> Iterator[Row]:
        for bytes, laps in found:
            for name, of in sends(link, ranks, bytes).items():
                yield {
                    "collective": name,
                    "ranks": ranks,
                    "bytes": bytes,
                    "sent": of.bytes,
                    "milliseconds": summary(laps[name]),
                    "predicted": 1e3 * of.seconds,
                    "fitted": name == FITTED,
                }

    return {"latency": latency, "rate": rate}, rows()


def count(group: Any) -> list[tuple[str, int, int, float]]:
    """Of collectives over the ranks of gloo: its name, bytes of the object, and what all ranks send for it.

    The latter is as a transport counts it, and as the planner says.
    """
    ranks, found = dist.get_world_size(group), []
    for elements in COUNTED:
        for name in sends(NO_LINK, ranks, 1):
            bytes, sent = counted(group, name, elements)
            found.append((name, bytes, sent, ranks * sends(NO_LINK, ranks, bytes)[name].bytes))
    return found


def _print_counts() -> int:
    """The exit status, on every rank the same."""
    rows = count(dist.group.WORLD)
    if dist.get_rank() == 0:
        heads = ["collective", "ranks", "bytes", "bytes that all ranks send", "as the planner says"]
        cells = [
            [name, str(dist.get_world_size()), str(bytes), str(sent), f"{said:.0f}"]
            for name, bytes, sent, said in rows
        ]
        print(table(heads, cells))
    return int(any(sent != round(said) for _, _, sent, said in rows))


def main(argv: list[str]) -> int:
    """Times all collectives, prints their table and returns the exit status, on every rank the same."""
    parser = Parser(prog="torchrun scripts/measure_collectives.py", description=__doc__.splitlines()[0])
    add_device(parser)
    parser.add_argument(
        "--mib",
        type=whole_number(1, 1 << 20),
        nargs="+",
        default=SIZES,
        metavar="MIB",
        help=f"sizes of the object, two or more (default: {' '.join(map(str, SIZES))})",
    )
    parser.add_argument(
        "--rounds", type=whole_number(2, 10**4), default=ROUNDS, help=f"of {CALLS} calls each (%(default)s)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with 1 where a collective of {LEAST_MIB} MiB or more takes not within "
        f"{COLLECTIVE_TOLERANCE:.0%} of what the planner says".replace("%", "%%"),
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="count bytes on the wire instead, and exit with 1 where the planner says others",
    )
    parser.add_argument("--out", type=some_path, metavar="DIR", help="folder for the results")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("no rank: start it by torchrun --nproc-per-node 2")
    if options.count:
        dist.init_process_group("gloo")
        failed = _print_counts()
        dist.destroy_process_group()
        return failed
    sizes = sorted(set(options.mib))
    if len(sizes) < 2:
        parser.error("argument --mib: expected two sizes or more, through which a line goes")
    if options.check and max(sizes) < LEAST_MIB:
        parser.error(f"argument --mib: expected a size of {LEAST_MIB} or more, which --check is about")
    check_folder(parser, options.out)
    device = device_of(parser, options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if (ranks := dist.get_world_size()) < 2:
        parser.error("one rank, expected two or more: torchrun --nproc-per-node 2")
    command = " ".join(["torchrun", f"--nproc-per-node {ranks}", "scripts/measure_collectives.py", *argv])
    first = dist.get_rank() == 0
    machine = environment(device, command) if first else {}  # while the others wait for it
    link, rows = measure(dist.group.WORLD, device, sizes, options.rounds)
    found = [*rows]
    if first:
        document = {"environment": machine, "backend": dist.get_backend(), "link": link}
        document |= {"speed": [], "memory": [], "overhead": [], "collectives": found}
        print(tables(document))
        if options.out is not None:
            name = re.sub(r"[^a-z0-9]+", "_", machine["device"].lower()).strip("_")
            with replacing(options.out / f"{name}_{device.type}_collectives.json") as whole:
                whole.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()
    return int(options.check and any(met_collective(row) is False for row in found))


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
