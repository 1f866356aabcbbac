"""python -m monoidreduce calibrate: measure a device's rates, for `mr.cost` to use in place of its own."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from monoidreduce._command_line import (
    Parser,
    add_device,
    check_environment,
    check_writable,
    device_of,
    positive_number,
    replacing,
)

__all__ = ["Rates", "main", "measure"]

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Rates:
    """The rates that torch reaches on a device.

    Attributes:
        device: its name.
        products: FLOP/s of a large matrix product, by dtype.
        bandwidth: bytes/s, read plus written, of a copy far larger than the caches.
        cached: the same for a copy that fits into the caches.
    """

    device: str
    products: dict[str, float]
    bandwidth: float
    cached: float


def seconds_of(device: torch.device, work: Callable[[], object], limit: float) -> float:
    """Run `work` for about `limit` seconds; return the fastest run, since other users may slow the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    laps: list[float] = []
    work()
    wait()
    end = time.perf_counter() + limit
    while not laps or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        wait()
        laps.append(time.perf_counter() - begin)
    return min(laps)


def _copy(device: torch.device, size: int, limit: float) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    repeats = max(1, (1 << 28) // size)  # a single small copy is too short to time

    def work() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return 2 * size * repeats / seconds_of(device, work, limit)


def measure(device: torch.device, limit: float) -> Rates:
    """Measure the rates of a device, each for about `limit` seconds."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    products = {}
    for dtype in DTYPES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = seconds_of(device, lambda a=a, b=b: a @ b, limit)  # type: ignore[misc]
        products[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    return Rates(
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        products=products,
        bandwidth=_copy(device, 1 << (30 if on_gpu else 28), limit),
        cached=_copy(device, 1 << (23 if on_gpu else 18), limit),
    )


def rates_file(text: str) -> Path:
    """Parse --out: a writable path that ends in .json."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a name that ends in .json")
    try:
        check_writable(path := Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}, cannot be written: {error.strerror}") from error
    return path


def main(argv: list[str]) -> int:
    """Print the rates; return the exit status. argv: arguments after `python -m monoidreduce calibrate`."""
    parser = Parser(
        prog="python -m monoidreduce calibrate",
        description="Measures matrix products and copies of torch on a device.",
    )
    add_device(parser)
    parser.add_argument(
        "--seconds", type=positive_number, default=3.0, help="for each rate (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--out", type=rates_file, metavar="FILE", help="JSON, which cost --hardware FILE takes"
    )
    options = parser.parse_args(argv)
    check_environment(parser)
    rates = measure(device_of(parser, options.device), options.seconds)
    if options.out is not None:
        with replacing(options.out) as file:
            file.write_text(json.dumps(asdict(rates), indent=2) + "\n", "utf-8")
    if options.json:
        print(json.dumps(asdict(rates), indent=2))
        return 0
    print(rates.device)
    for dtype, rate in rates.products.items():
        print(f"  products, {dtype:<10}{rate:>10.3g} FLOP/s")
    print(f"  copies             {rates.bandwidth:>10.3g} B/s")
    print(f"  copies in caches   {rates.cached:>10.3g} B/s")
    balance = rates.products["bfloat16"] / rates.bandwidth
    print(f"  balance, bfloat16  {balance:>10.3g} FLOP a byte")
    return 0
