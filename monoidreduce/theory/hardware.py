"""Accelerators: rates, memories and links, each with its source. SI units: FLOP/s, bytes/s, bytes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from monoidreduce import _C
from monoidreduce._validate import check_choice, check_finite, check_int, mismatch

__all__ = ["CPU", "HARDWARE", "Hardware", "Link", "Measured", "Processor", "find", "find_gpu", "load"]

MIB = 1 << 20
OLDEST = (8, 0)  # compute capability that kernels are built for
# A contraction's tiles belong to pairs of multiprocessors. No GPU has near the most.
MULTIPROCESSORS = 2, 1024


def _check_rate(name: str, value: object) -> None:
    expected = "a finite number > 0"
    if check_finite(name, value, expected) <= 0:
        raise ValueError(mismatch(name, expected, repr(value)))


def _check_count(name: str, value: object, least: int = 1, most: float = math.inf) -> None:
    expected = f"a whole number from {least}" + (f" to {most}" if most < math.inf else "")
    if not least <= check_int(name, value, expected) <= most:
        raise ValueError(mismatch(name, expected, repr(value)))


@dataclass(frozen=True)
class Measured:
    """Rates that were measured on the device; others than finite ones above 0 raise TypeError or ValueError.

    Attributes:
        peak: FLOP/s of a large bfloat16 matrix product.
        bandwidth: bytes/s of a large copy, read and written.
        l2: bytes of the L2 cache that hold data before DRAM sees them; None where unknown.
        source: where each number is from.
    """

    peak: float
    bandwidth: float
    l2: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth") + ("l2",) * (self.l2 is not None):
            _check_rate(f"measured.{name}", getattr(self, name))


@dataclass(frozen=True)
class Link:
    """A device's way to others, as collectives see it.

    Attributes:
        rate: bytes/s that a device sends.
        latency: seconds of a collective beside its bytes; between nodes, of each step to another node.
        source: where the numbers are from.
    """

    rate: float
    latency: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One device, and its links to others.

    Attributes:
        name: as in `HARDWARE`.
        peak: dense bfloat16 FLOP/s of the data sheet.
        bandwidth: bytes/s between the device's memory and its caches.
        memory: bytes.
        link: bytes/s that the device sends along one physical axis of its interconnect, over all links of it.
        axes: the number of physical axes. A switch, such as NVLink's, is one axis.
        joined: the most chips that these links join.
        source: where the numbers are from, but measured ones.
        l2: bytes of the L2 cache.
        shared: bytes of shared memory that a thread block can have.
        multiprocessors: their number.
        capability: compute capability of a GPU of NVIDIA's.
        measured: rates that were measured; None where nobody did.
        within: collectives in a node of `joined` devices; None where nobody measured.
        between: the device's own part of the network between such nodes; None where unknown.

    Raises:
        TypeError, ValueError: a rate or a size is not finite and above 0. A GPU's compute capability is below
            8.0, or its l2, shared or multiprocessors (2 to 1024) are missing.
    """

    name: str
    peak: float
    bandwidth: float
    memory: float
    link: float
    axes: int
    joined: int
    source: str
    l2: int | None = None
    shared: int | None = None
    multiprocessors: int | None = None
    capability: tuple[int, int] | None = None
    measured: Measured | None = None
    within: Link | None = None
    between: Link | None = None

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth", "memory", "link"):
            _check_rate(name, getattr(self, name))
        for name in ("axes", "joined"):
            _check_count(name, getattr(self, name))
        if self.capability is None:
            return
        if len(self.capability) != 2 or tuple(self.capability) < OLDEST:
            raise ValueError(mismatch("capability", "two numbers, from 8.0 on", self.capability))
        for name in ("l2", "shared"):
            _check_count(name, getattr(self, name))
        _check_count("multiprocessors", self.multiprocessors, *MULTIPROCESSORS)

    def reached(self, dtype: torch.dtype) -> tuple[float, float]:
        """FLOP/s of bfloat16 products, of any dtype, and bytes/s: measured, or the data sheet's."""
        of = self if self.measured is None else self.measured
        return of.peak, of.bandwidth

    @property
    def kept(self) -> float:
        """Bytes that the L2 cache keeps of what all multiprocessors read.

        Half of it where nobody measured: both partitions of the cache hold a copy.
        """
        measured = self.measured.l2 if self.measured is not None else None
        return (self.l2 or 0) / 2 if measured is None else measured

    def facts(self) -> _C.DeviceFacts:
        """What plans of kernels depend on. Raises ValueError for what is no GPU of NVIDIA's."""
        if self.capability is None:
            raise ValueError(mismatch("hardware", "a GPU of NVIDIA's", self.name))
        assert self.multiprocessors and self.l2 and self.shared
        return _C.DeviceFacts(*self.capability, self.multiprocessors, self.l2, self.shared)


@dataclass(frozen=True)
class Processor:
    """A CPU, by what torch reaches on all threads that it uses there.

    Attributes:
        name: for people.
        products: by dtype, as "bfloat16", FLOP/s of a large matrix product.
        bandwidth: bytes/s of a large copy, read and written.
        source: where the numbers are from.

    Raises:
        TypeError, ValueError: a rate is not finite and above 0.
    """

    name: str
    products: dict[str, float]
    bandwidth: float
    source: str

    def __post_init__(self) -> None:
        for dtype, rate in self.products.items():
            _check_rate(f"products, {dtype}", rate)
        _check_rate("bandwidth", self.bandwidth)

    def reached(self, dtype: torch.dtype) -> tuple[float, float]:
        """FLOP/s of products of a dtype, and bytes/s. Raises ValueError for a dtype that was not measured."""
        name = str(dtype).removeprefix("torch.")
        check_choice("dtype", name, tuple(self.products))
        return self.products[name], self.bandwidth


# Two cores of a virtual machine.
CPU = Processor(
    name="cpu",
    products={"float32": 1.85e11, "bfloat16": 7.98e11},
    bandwidth=3.87e10,
    source="bench/results/amd_epyc_cpu.json: 2 threads of an AMD EPYC with AVX-512 BF16, torch 2.13.0",
)

# A line through an all-gather of 64 MiB at 223 GB/s and one of 1 GiB at 283. These rates are
# (ranks - 1) / ranks of the bytes over the time. The line has 63 us for 16 MiB and 500 for 256, where 49 and
# 530 were measured.
_NVLINK_4 = Link(
    rate=2.88e11,
    latency=3.4e-5,
    source="all-gathers of NCCL 2.28.3 between two H200s that 18 NVLinks join, as an H100 has them",
)
# Nobody measured it.
_CONNECTX_7 = Link(
    rate=5e10,
    latency=1.4e-5,
    source="NVIDIA's data sheets of DGX H100 and H200, 400 Gb/s a GPU; latency of NCCL's own cost model, a "
    "step of a ring over a network",
)

_ENTRIES = (
    Hardware(
        name="a100",
        peak=3.12e14,
        bandwidth=1.6e12,
        memory=40e9,
        link=3e11,
        axes=1,
        joined=8,
        source="Rooflines and Scaling, 1.1 and A.1.1; the rest from NVIDIA's data sheet of the 40 GB module",
        l2=40 * MIB,
        shared=163 << 10,
        multiprocessors=108,
        capability=(8, 0),
    ),
    Hardware(
        name="h100",
        peak=9.89e14,
        bandwidth=3.35e12,
        memory=80e9,
        link=4.5e11,
        axes=1,
        joined=8,
        source="NVIDIA's data sheet of the SXM module",
        l2=50 * MIB,
        shared=227 << 10,
        multiprocessors=132,
        capability=(9, 0),
        measured=Measured(
            peak=7.9e14,
            bandwidth=3.009e12,
            l2=24.9e6,
            source="peak: product_gflops of bench/results/nvidia_h100_*.json, of which 7.9e14 is near the "
            "least; bandwidth: copy_gbytes of nvidia_h100_80gb_hbm3_cuda_traffic.json; l2: what DRAM did not "
            "see of the 134 MB that attention's backward pass clears, in the same file",
        ),
        within=_NVLINK_4,
        between=_CONNECTX_7,
    ),
    Hardware(
        name="h200",
        peak=9.89e14,
        bandwidth=4.8e12,
        memory=141e9,
        link=4.5e11,
        axes=1,
        joined=8,
        source="NVIDIA's data sheet of the SXM module",
        l2=60 * MIB,
        shared=227 << 10,
        multiprocessors=132,
        capability=(9, 0),
        measured=Measured(
            peak=7.925e14,
            bandwidth=4.277e12,
            source="product_gflops and copy_gbytes of bench/results/nvidia_h200_cuda_overhead.json",
        ),
        within=_NVLINK_4,
        between=_CONNECTX_7,
    ),
    Hardware(
        name="b200",
        peak=2.25e15,
        bandwidth=8e12,
        memory=180e9,
        link=9e11,
        axes=1,
        joined=8,
        source="NVIDIA's data sheet of HGX B200",
        l2=126 * MIB,
        shared=227 << 10,
        multiprocessors=148,
        capability=(10, 0),
    ),
    Hardware(
        name="v5p",
        peak=4.59e14,
        bandwidth=2.765e12,
        memory=95e9,
        link=1.8e11,
        axes=3,
        joined=16 * 20 * 28,
        source="Rooflines and Scaling, section 2; the rest from Google's page of TPU v5p, whose 1.2e12 "
        "bytes/s between chips, in both directions, are more than the paper's 5.4e11 sent over three axes",
    ),
)

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
# What torch calls the modules of the entries. Others of these chips, as PCIe cards, have other rates.
_DEVICES = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def find(name: str) -> Hardware:
    """The device of that name. Raises ValueError for a name that is not in `HARDWARE`."""
    check_choice("hardware", name, tuple(HARDWARE))
    return HARDWARE[name]


def find_gpu(device: str) -> Hardware | None:
    """The GPU that torch.cuda.get_device_name calls so; None where the table has none of that name."""
    return HARDWARE.get(_DEVICES.get(device, ""))


def load(path: str | Path) -> Hardware | Processor:
    """The device whose rates `python -m monoidreduce calibrate --out path` wrote.

    A GPU is the entry of its name with these rates as the measured ones.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or of a GPU that is not in `HARDWARE`.
    """
    source = f"python -m monoidreduce calibrate --out {Path(path).name}"
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        device, products, bandwidth = (found[name] for name in ("device", "products", "bandwidth"))
        if device == "CPU":
            return Processor(Path(path).stem, products, bandwidth, source)
        entry = find_gpu(device)
        kept = None if entry is None or entry.measured is None else entry.measured.l2
        measured = Measured(products["bfloat16"], bandwidth, kept, source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        expected = "a file that `python -m monoidreduce calibrate --out` writes"
        raise ValueError(mismatch("hardware", expected, path)) from error
    if entry is None:
        raise ValueError(mismatch("hardware", f"rates of one of {', '.join(_DEVICES)}", device))
    return replace(entry, name=Path(path).stem, measured=measured)
