"""Rooflines (paper, sections 1.1, 1.2 and 2.1): how fast arithmetic can be beside its traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from monoidreduce._validate import mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_amounts, check_numbers

__all__ = ["Roofline", "Work", "interconnect", "on_device"]


@dataclass(frozen=True)
class Work:
    """What a kernel, a layer or a phase of a step does: n_F FLOPs, and n_B or n_I bytes that it moves.

    Works add, and `3 * work` is three times the work: a batch of products has the intensity of one (A.1.3).
    Raises TypeError or ValueError unless both are finite numbers, 0 or above.
    """

    flops: float
    bytes: float

    def __post_init__(self) -> None:
        check_amounts(flops=self.flops, bytes=self.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs a byte, I = n_F / n_B (section 1.1); infinite where nothing is moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __rmul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.bytes)


def _check_intensity(intensity: float) -> None:
    if not intensity >= 0:  # infinite where nothing is moved
        raise ValueError(mismatch("intensity", "a number >= 0", intensity))


@dataclass(frozen=True)
class Roofline:
    """A peak rate of arithmetic, FLOP/s, above a path of some bandwidth, bytes/s.

    The path leads to the memory of a device (section 1) or to other chips (section 2).
    Raises TypeError or ValueError unless both are finite numbers above 0.
    """

    peak: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_numbers(peak=self.peak, bandwidth=self.bandwidth)

    @property
    def critical_intensity(self) -> float:
        """The intensity from which on arithmetic is the bound, I* = pi / beta (section 1.1, equation 7)."""
        return self.peak / self.bandwidth

    def rate(self, intensity: float) -> float:
        """The most FLOP/s at that intensity, P = min(pi, beta I) (equation 2); ValueError below 0."""
        _check_intensity(intensity)
        return min(self.peak, self.bandwidth * intensity)

    def mfu(self, intensity: float) -> float:
        """The most MFU at that intensity, min(1, I / I*) (equation 3): 1 from the critical intensity on.

        Raises ValueError for an intensity below 0.
        """
        _check_intensity(intensity)
        return min(1.0, intensity / self.critical_intensity)

    def seconds(self, work: Work) -> float:
        """The time if arithmetic and traffic overlap, t = max(t_F, t_B) (equation 1)."""
        return max(work.flops / self.peak, work.bytes / self.bandwidth)

    def seconds_without_overlap(self, work: Work) -> float:
        """The time if nothing overlaps, t_F + t_B, which real kernels do not exceed (footnote 1)."""
        return work.flops / self.peak + work.bytes / self.bandwidth


def on_device(hardware: Hardware) -> Roofline:
    """The roofline of a device and its own memory, by the data sheet."""
    return Roofline(hardware.peak, hardware.bandwidth)


def interconnect(hardware: Hardware, axes: float = 1) -> Roofline:
    """The roofline of a device and its links along `axes` physical axes, of I*_I / m (equation 7).

    Raises TypeError or ValueError unless the device has so many axes. A fraction is a part of one.
    """
    check_numbers(axes=axes)
    if axes > hardware.axes:
        raise ValueError(mismatch("axes", f"at most the {hardware.axes} of {hardware.name}", f"{axes:g}"))
    return Roofline(hardware.peak, axes * hardware.link)
