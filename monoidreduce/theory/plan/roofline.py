"""Rooflines (paper, sections 1.1, 1.2 and 2.1): how memory or link traffic limits arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from monoidreduce._validate import mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_amounts, check_numbers

__all__ = ["Roofline", "Work", "interconnect", "on_device"]


@dataclass(frozen=True)
class Work:
    """Work of a kernel, a layer or a phase of a step: n_F FLOPs, and n_B or n_I bytes moved.

    Works can be added and multiplied by numbers: `3 * work` is a batch of three, with the same intensity
    (A.1.3).

    Raises TypeError or ValueError unless both are finite numbers, 0 or above.
    """

    flops: float
    bytes: float

    def __post_init__(self) -> None:
        check_amounts(flops=self.flops, bytes=self.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs per byte, I = n_F / n_B (section 1.1); infinite if no bytes are moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __rmul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.bytes)


def _check_intensity(intensity: float) -> None:
    if not intensity >= 0:  # infinity is allowed
        raise ValueError(mismatch("intensity", "a number >= 0", intensity))


@dataclass(frozen=True)
class Roofline:
    """A peak rate of arithmetic, FLOP/s, and a bandwidth, bytes/s.

    The bandwidth is that to a device's memory (section 1) or to other chips (section 2).

    Raises TypeError or ValueError unless both are finite numbers above 0.
    """

    peak: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_numbers(peak=self.peak, bandwidth=self.bandwidth)

    @property
    def critical_intensity(self) -> float:
        """The intensity from which on arithmetic is the bottleneck: I* = pi / beta (section 1.1, eq. 7)."""
        return self.peak / self.bandwidth

    def rate(self, intensity: float) -> float:
        """The highest FLOP/s at this intensity, P = min(pi, beta I) (equation 2).

        Raises ValueError for a negative intensity.
        """
        _check_intensity(intensity)
        return min(self.peak, self.bandwidth * intensity)

    def mfu(self, intensity: float) -> float:
        """The highest MFU at this intensity, min(1, I / I*) (equation 3).

        Raises ValueError for a negative intensity.
        """
        _check_intensity(intensity)
        return min(1.0, intensity / self.critical_intensity)

    def seconds(self, work: Work) -> float:
        """The time if arithmetic and traffic overlap, t = max(t_F, t_B) (equation 1)."""
        return max(work.flops / self.peak, work.bytes / self.bandwidth)

    def seconds_without_overlap(self, work: Work) -> float:
        """The time if nothing overlaps, t_F + t_B, an upper bound for real kernels (footnote 1)."""
        return work.flops / self.peak + work.bytes / self.bandwidth


def on_device(hardware: Hardware) -> Roofline:
    """The roofline of a device and its own memory, from the data sheet."""
    return Roofline(hardware.peak, hardware.bandwidth)


def interconnect(hardware: Hardware, axes: float = 1) -> Roofline:
    """The roofline of a device and its links along `axes` physical axes; its critical intensity is I*_I / m.

    See equation 7. A fraction below 1 is a part of one axis's bandwidth.

    Raises TypeError or ValueError unless the device has that many axes.
    """
    check_numbers(axes=axes)
    if axes > hardware.axes:
        raise ValueError(mismatch("axes", f"at most the {hardware.axes} of {hardware.name}", f"{axes:g}"))
    return Roofline(hardware.peak, axes * hardware.link)
