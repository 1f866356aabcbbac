"""A table of accelerators: rates, memories and links, with sources. Units are FLOP/s, bytes/s and bytes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from monoidreduce import _C
from monoidreduce._validate import check_choice, check_finite, check_int, mismatch

__all__ = [
    "CPU",
    "HARDWARE",
    "NETWORKS",
    "Hardware",
    "Link",
    "Measured",
    "Processor",
    "find",
    "find_gpu",
    "load",
]

MIB = 1 << 20
GIB = 1 << 30
OLDEST = (8, 0)  # lowest compute capability that kernels are built for
# Range of valid numbers. A tile of a contraction needs two multiprocessors; no GPU has nearly 1024.
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
    """Rates measured on a device. Raises TypeError or ValueError unless each is finite and positive.

    Attributes:
        peak: FLOP/s of a large bfloat16 matrix product.
        bandwidth: bytes/s of a large copy, read plus written.
        l2: bytes that the L2 cache can hold back from DRAM; None if unknown.
        source: where each number is from.
        sustained: as peak, of products that follow one another without a pause, so that the power limit
            lowers the clock; None if not measured.
    """

    peak: float
    bandwidth: float
    l2: float | None = None
    source: str = ""
    sustained: float | None = None

    def __post_init__(self) -> None:
        known = [name for name in ("l2", "sustained") if getattr(self, name) is not None]
        for name in ("peak", "bandwidth", *known):
            _check_rate(f"measured.{name}", getattr(self, name))


@dataclass(frozen=True)
class Link:
    """A device's connection to other devices, as collectives see it.

    Attributes:
        rate: bytes/s that a device sends.
        latency: fixed seconds of a collective; between nodes, of each step to another node.
        source: where the numbers are from.
    """

    rate: float
    latency: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One device, and its links to others.

    Attributes:
        name: its key in `HARDWARE`.
        peak: dense bfloat16 FLOP/s from the data sheet.
        bandwidth: bytes/s between the device's memory and its caches.
        memory: bytes of device memory.
        link: bytes/s that the device sends along one physical axis of its interconnect, over all its links.
        axes: number of physical axes. A switch, such as NVLink's, counts as one axis.
        joined: largest number of chips that these links join.
        source: where the numbers are from, except measured ones.
        l2: bytes of the L2 cache.
        shared: bytes of shared memory that a thread block can use.
        multiprocessors: number of multiprocessors.
        capability: compute capability of an NVIDIA GPU; None for other devices.
        measured: measured rates; None if there are none.
        within: collectives within a node of `joined` devices; None if not measured.
        between: one device's share of the network between nodes; None if unknown.
        float8: dense FLOP/s of products of 8-bit floating-point numbers; None if the device has none.

    Raises:
        TypeError, ValueError: a rate or size is not finite and positive; or a GPU's compute capability is
            below 8.0; or a GPU's l2, shared or multiprocessors (2 to 1024) are missing.
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
    float8: float | None = None

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth", "memory", "link") + ("float8",) * (self.float8 is not None):
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
        """FLOP/s of bfloat16 products, whatever dtype is, and bytes/s: measured, else from the data sheet."""
        of = self if self.measured is None else self.measured
        return of.peak, of.bandwidth

    @property
    def kept(self) -> float:
        """Usable bytes of the L2 cache for data that all multiprocessors read.

        If not measured, half of the cache: each of its two partitions holds a copy.
        """
        measured = self.measured.l2 if self.measured is not None else None
        return (self.l2 or 0) / 2 if measured is None else measured

    def sustained(self) -> Hardware:
        """The device when passes follow one another without a pause: its measured peak is the sustained one.

        Raises ValueError if that was not measured.
        """
        measured = self.measured
        if measured is None or measured.sustained is None:
            raise ValueError(mismatch("hardware", "a GPU whose sustained rate was measured", self.name))
        return replace(self, measured=replace(measured, peak=measured.sustained))

    def facts(self) -> _C.DeviceFacts:
        """The facts that kernel plans depend on. Raises ValueError if it is not an NVIDIA GPU."""
        if self.capability is None:
            raise ValueError(mismatch("hardware", "a GPU of NVIDIA's", self.name))
        assert self.multiprocessors and self.l2 and self.shared
        return _C.DeviceFacts(*self.capability, self.multiprocessors, self.l2, self.shared)


@dataclass(frozen=True)
class Processor:
    """A CPU, described by the rates that torch reaches on it with all its threads.

    Attributes:
        name: name for display.
        products: FLOP/s of a large matrix product, by dtype name such as "bfloat16".
        bandwidth: bytes/s of a large copy, read plus written.
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
        """FLOP/s of products in dtype, and bytes/s. Raises ValueError for a dtype that was not measured."""
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

# A line fitted through an all-gather of 64 MiB at 223 GB/s and one of 1 GiB at 283 GB/s; these rates are
# (ranks - 1) / ranks of the bytes over the time. The line predicts 63 us for 16 MiB and 500 us for 256 MiB;
# measured were 49 and 530 us.
_NVLINK_4 = Link(
    rate=2.88e11,
    latency=3.4e-5,
    source="all-gathers of NCCL 2.28.3 between two H200s that 18 NVLinks join, as an H100 has them",
)
_STEP = "latency of NCCL's own cost model, a step of a ring over a network"
# One device's share of the networks between nodes, at line rate, each way. From data sheets; not measured.
NETWORKS: dict[str, Link] = {
    "infiniband-hdr": Link(2.5e10, 1.4e-5, f"200 Gb/s a GPU, NVIDIA's data sheet of DGX A100; {_STEP}"),
    "infiniband-ndr": Link(5e10, 1.4e-5, f"400 Gb/s a GPU, NVIDIA's data sheets of DGX H100, H200; {_STEP}"),
    "roce-200": Link(2.5e10, 1.4e-5, f"200 Gb/s of Ethernet a GPU; {_STEP}"),
    "roce-400": Link(5e10, 1.4e-5, f"400 Gb/s of Ethernet a GPU, The Llama 3 Herd of Models, 3.3.1; {_STEP}"),
    "omnipath-50": Link(6.25e9, 1.4e-5, f"4 links of 100 Gb/s a node of 8 GPUs, as BLOOM's cluster; {_STEP}"),
    "dcn": Link(6.25e9, 1.4e-5, f"How to Scale Your Model, section 2: a chip of TPU v4 or v5p; {_STEP}"),
}

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
        between=NETWORKS["infiniband-hdr"],
    ),
    Hardware(
        name="a100-80gb",
        peak=3.12e14,
        bandwidth=2.039e12,
        memory=80e9,
        link=3e11,
        axes=1,
        joined=8,
        source="NVIDIA's data sheet of the 80 GB SXM module",
        l2=40 * MIB,
        shared=163 << 10,
        multiprocessors=108,
        capability=(8, 0),
        between=NETWORKS["infiniband-hdr"],
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
        between=NETWORKS["infiniband-ndr"],
        float8=1.979e15,
    ),
    Hardware(
        name="h100-hbm2e",
        peak=9.89e14,
        bandwidth=2.4e12,
        memory=96 * GIB,
        link=4.5e11,
        axes=1,
        joined=8,
        source="torchtitan's benchmarks of December 2024: SXM modules with 96 GB of HBM2e, limited to 500 W; "
        "the rest as h100",
        l2=50 * MIB,
        shared=227 << 10,
        multiprocessors=132,
        capability=(9, 0),
        within=_NVLINK_4,
        between=NETWORKS["infiniband-ndr"],
        float8=1.979e15,
    ),
    Hardware(
        name="h800",
        peak=9.89e14,
        bandwidth=3.35e12,
        memory=80e9,
        link=2e11,
        axes=1,
        joined=8,
        source="h100 with NVLinks of 400 GB/s, both ways together; 400 Gb/s of InfiniBand a GPU as in "
        "Insights into DeepSeek-V3, section 4",
        l2=50 * MIB,
        shared=227 << 10,
        multiprocessors=132,
        capability=(9, 0),
        between=NETWORKS["infiniband-ndr"],
        float8=1.979e15,
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
            source="product_gflops and copy_gbytes of bench/results/nvidia_h200_cuda_overhead.json; "
            "sustained: the repeated product of bench/results/compare/nvidia_h200_clocks.json",
            sustained=6.716e14,
        ),
        within=_NVLINK_4,
        between=NETWORKS["infiniband-ndr"],
        float8=1.979e15,
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
        between=NETWORKS["infiniband-ndr"],
        float8=4.5e15,
    ),
    Hardware(
        name="v4",
        peak=2.75e14,
        bandwidth=1.228e12,
        memory=32 * GIB,
        link=9e10,
        axes=3,
        joined=16**3,
        source="How to Scale Your Model, section 2; Google's page of TPU v4",
        between=NETWORKS["dcn"],
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
        between=NETWORKS["dcn"],
    ),
)

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
# Device names as torch reports them. Other modules with these chips, such as PCIe cards, have other rates.
_DEVICES = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def find(name: str) -> Hardware:
    """The device of this name. Raises ValueError for a name that is not in `HARDWARE`."""
    check_choice("hardware", name, tuple(HARDWARE))
    return HARDWARE[name]


def find_gpu(device: str) -> Hardware | None:
    """The GPU with this name from torch.cuda.get_device_name; None if the table does not have it."""
    return HARDWARE.get(_DEVICES.get(device, ""))


def load(path: str | Path) -> Hardware | Processor:
    """The device described by a file that `python -m monoidreduce calibrate --out path` wrote.

    For a GPU, it is the entry in `HARDWARE` with the file's rates as measured rates.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, or its GPU is not in `HARDWARE`.
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
