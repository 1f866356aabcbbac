"""FSDP and tensor parallelism over independent axes (paper, section 2.5), for a feedforward layer's forward.

Symbols: B tokens, width d, hidden width D; K = K_F K_T chips over m_F and m_T physical axes; I*_I is the
critical intensity of one axis. The forward becomes communication-bound before the backward does (footnote 8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_counts, check_numbers
from monoidreduce.theory.plan.mesh import check_links

__all__ = [
    "ShardedLayer",
    "least_communication_seconds",
    "least_tokens_per_chip",
    "optimal_fsdp_chips",
    "sharded_layers",
]


@dataclass(frozen=True)
class ShardedLayer:
    """The forward of a feedforward layer of two matrices, on one chip of a K_F x K_T mesh (equation 13).

    Attributes:
        fsdp_chips, tp_chips: K_F and K_T.
        compute_seconds: t_F = 4 B d D / (K pi), where pi is a chip's peak FLOP/s.
        fsdp_seconds: time of the weights' all-gather, 4 d D / K_T bytes over m_F axes.
        tp_seconds: time of the activations' all-reduce, 4 B d / K_F bytes over m_T axes.
    """

    fsdp_chips: float
    tp_chips: float
    compute_seconds: float
    fsdp_seconds: float
    tp_seconds: float

    @classmethod
    def of(
        cls,
        tokens: float,
        width: float,
        hidden: float,
        fsdp_chips: float,
        tp_chips: float,
        hardware: Hardware,
        fsdp_axes: float = 2,
        tp_axes: float = 1,
    ) -> ShardedLayer:
        """The times on `hardware`. Numbers of chips may be fractions, because K_F* is one in general.

        Raises TypeError or ValueError unless all numbers are finite and positive, and `hardware` has that
        many axes.
        """
        check_numbers(tokens=tokens, width=width, hidden=hidden, fsdp_chips=fsdp_chips, tp_chips=tp_chips)
        check_numbers(fsdp_axes=fsdp_axes, tp_axes=tp_axes)
        check_links(hardware, {"fsdp": fsdp_axes, "tp": tp_axes})
        return cls(
            fsdp_chips,
            tp_chips,
            compute_seconds=4 * tokens * width * hidden / (fsdp_chips * tp_chips * hardware.peak),
            fsdp_seconds=4 * width * hidden / tp_chips / (fsdp_axes * hardware.link),
            tp_seconds=4 * tokens * width / fsdp_chips / (tp_axes * hardware.link),
        )

    @property
    def communication_seconds(self) -> float:
        """The slower of the two collectives; they run at the same time on separate axes."""
        return max(self.fsdp_seconds, self.tp_seconds)

    @property
    def is_compute_bound(self) -> bool:
        return self.compute_seconds >= self.communication_seconds

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.communication_seconds)


def optimal_fsdp_chips(
    tokens: float, hidden: float, chips: float, fsdp_axes: float = 2, tp_axes: float = 1
) -> float:
    """K_F* = sqrt(B K m_F / (D m_T)), for which both collectives take equally long (equation 14)."""
    check_numbers(tokens=tokens, hidden=hidden, chips=chips, fsdp_axes=fsdp_axes, tp_axes=tp_axes)
    return math.sqrt(tokens * chips * fsdp_axes / (hidden * tp_axes))


def least_communication_seconds(
    tokens: float,
    width: float,
    hidden: float,
    chips: float,
    link: float,
    fsdp_axes: float = 2,
    tp_axes: float = 1,
) -> float:
    """Communication time at K_F*: (4 d / beta_I) sqrt(B D / (K m_F m_T)) (below equation 14).

    link: beta_I, bytes/s along one physical axis.
    """
    check_numbers(tokens=tokens, width=width, hidden=hidden, chips=chips, link=link)
    check_numbers(fsdp_axes=fsdp_axes, tp_axes=tp_axes)
    return 4 * width / link * math.sqrt(tokens * hidden / (chips * fsdp_axes * tp_axes))


def least_tokens_per_chip(
    hidden: float, critical_intensity: float, fsdp_axes: float = 2, tp_axes: float = 1
) -> float:
    """The least B / K for which the best K_F is compute-bound: I*_I^2 / (D m_F m_T) (equation 15)."""
    check_numbers(hidden=hidden, critical_intensity=critical_intensity, fsdp_axes=fsdp_axes, tp_axes=tp_axes)
    return critical_intensity**2 / (hidden * fsdp_axes * tp_axes)


def sharded_layers(
    tokens: float,
    width: float,
    hidden: int,
    chips: int,
    hardware: Hardware,
    fsdp_axes: float = 2,
    tp_axes: float = 1,
) -> list[ShardedLayer]:
    """All meshes K_F x K_T of integers where K_T divides D, least communication first.

    K_F* is not an integer in general, so the meshes are enumerated instead of rounding it.
    """
    check_counts(hidden=hidden, chips=chips)
    layers = [
        ShardedLayer.of(tokens, width, hidden, chips // tp, tp, hardware, fsdp_axes, tp_axes)
        for tp in range(1, chips + 1)
        if chips % tp == 0 and hidden % tp == 0
    ]
    return sorted(layers, key=lambda layer: layer.communication_seconds)
