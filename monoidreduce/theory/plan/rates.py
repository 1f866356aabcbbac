"""Which share of a chip's published peak rates training reaches, for products, attention and 8-bit products.

The shares are fitted to some of the published runs; `runs.py` marks these.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from monoidreduce._validate import mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_numbers

__all__ = ["IDEAL", "Rates", "rates_of"]


@dataclass(frozen=True)
class Rates:
    """Fractions of the rates in a device's entry, each above 0 and at most 1.

    Attributes:
        matmul: of the peak, by large products. Their traffic to the chip's memory comes on top.
        float8: of the peak of 8-bit products, likewise.
        attention: of the peak, by attention kernels that do not store scores.
        sinks: likewise, of attention with sinks.
        memory: of the bandwidth, by operations that are bound by memory.
        links: of the links' rate, by large collectives.
        beside: of the time of collectives that run beside arithmetic, which arithmetic takes longer.
        launching: no fraction, but the seconds in which a host launches the products of one expert, forward
            and backward, where experts are not grouped.

    Raises TypeError or ValueError for other values.
    """

    matmul: float
    float8: float
    attention: float
    sinks: float
    memory: float
    links: float
    beside: float
    launching: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("beside", "launching") or value != 0:
                check_numbers(**{field.name: value})
            if value > 1:
                raise ValueError(mismatch(field.name, "a number above 0, at most 1", value))


IDEAL = Rates(1, 1, 1, 1, 1, 1, 0, 0)  # as the paper's formulas

# Not fitted: what copies reach of memory's bandwidth (bench/results), and large collectives of links' rates
# (nccl-tests); and a guess of how much collectives slow down what runs beside them.
_GIVEN = dict(memory=0.8, links=0.8, beside=0.3)
# Fitted together, by least squares of logarithms of step times, to the runs that `runs.RUNS` marks.
_FITTED = dict(sinks=0.053, launching=5.4e-4)
_AMPERE = Rates(0.80, 0.80, 0.41, **_FITTED, **_GIVEN)
_HOPPER = Rates(0.65, 0.84, 0.23, **_FITTED, **_GIVEN)
_LIMIT = 0.86  # an H100 limited to 500 W, of one with 700 W
_TPU = Rates(0.84, 0.84, 0.41, **_FITTED, **_GIVEN)
_LIMITED = replace(
    _HOPPER,
    matmul=_LIMIT * _HOPPER.matmul,
    float8=_LIMIT * _HOPPER.float8,
    attention=_LIMIT * _HOPPER.attention,
)
_RATES = {"a100": _AMPERE, "a100-80gb": _AMPERE, "h100-hbm2e": _LIMITED, "v4": _TPU, "v5p": _TPU}


def rates_of(hardware: Hardware) -> Rates:
    """The fractions that runs on this hardware reach; of hardware without runs, those of an H100."""
    return _RATES.get(hardware.name, _HOPPER)
