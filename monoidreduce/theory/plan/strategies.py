"""Strategies to train on several chips (paper, sections 2.1 to 2.4 and Table 3): what a chip computes and
sends.

Weights, activations and gradients have two bytes per element. As in the paper, only matrix products with
parameters are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.collectives import sent
from monoidreduce.theory.plan.roofline import Roofline, Work

__all__ = ["Phases", "data_parallel", "fully_sharded", "least_hidden", "tensor_parallel"]

BF16 = 2


@dataclass(frozen=True)
class Phases:
    """A training step of one chip: FLOPs and sent bytes, forward and backward."""

    forward: Work
    backward: Work

    @property
    def intensity(self) -> float:
        """The interconnect intensity I_I, the lower one of the two phases (equation 7)."""
        return min(self.forward.intensity, self.backward.intensity)

    def is_compute_bound(self, roofline: Roofline) -> bool:
        """Whether neither phase waits for the links: I_I >= I*_I / m (equation 7)."""
        return self.intensity >= roofline.critical_intensity

    def seconds(self, roofline: Roofline) -> float:
        """Forward then backward, each with its communication overlapped with its arithmetic."""
        return roofline.seconds(self.forward) + roofline.seconds(self.backward)

    def overlapped_seconds(self, roofline: Roofline) -> float:
        """The longer phase (equation 6), if phases of neighbouring batches overlap.

        A compute-bound chip has to compute both phases, so it takes `seconds`, 1.5 times as long. Only that
        agrees with 6 FLOPs per parameter and token (equations 4 and 5).
        """
        return max(roofline.seconds(self.forward), roofline.seconds(self.backward))


def data_parallel(parameters: float, tokens: float, chips: float) -> Phases:
    """Tokens are sharded; gradients are all-reduced (section 2.2): I_I = B / K (equation 8).

    Equation 9 is `overlapped_seconds` of this result with an empirical roofline.
    """
    check_numbers(parameters=parameters, tokens=tokens, chips=chips)
    flops = parameters * tokens / chips
    return Phases(Work(2 * flops, 0), Work(4 * flops, sent("all-reduce", BF16 * parameters)))


def fully_sharded(parameters: float, tokens: float, chips: float) -> Phases:
    """Tokens and state are sharded (section 2.3): I_I = B / K (equation 10).

    Weights are all-gathered in both phases, gradients reduce-scattered.
    """
    check_numbers(parameters=parameters, tokens=tokens, chips=chips)
    flops, weights = parameters * tokens / chips, BF16 * parameters
    return Phases(
        Work(2 * flops, sent("all-gather", weights)),
        Work(4 * flops, sent("all-gather", weights) + sent("reduce-scatter", weights)),
    )


def tensor_parallel(tokens: float, width: float, hidden: float, chips: float) -> Phases:
    """A feedforward layer of two matrices with sharded hidden width (section 2.4): I_I = D / K (equation 12).

    The activations [tokens, width] are all-reduced in each phase. Appendix D lists the operations
    (`all_reduce_version`).
    """
    check_numbers(tokens=tokens, width=width, hidden=hidden, chips=chips)
    flops, activations = tokens * width * hidden / chips, sent("all-reduce", BF16 * tokens * width)
    return Phases(Work(4 * flops, activations), Work(8 * flops, activations))


def least_hidden(chips: float, roofline: Roofline) -> float:
    """The least hidden width for which tensor parallelism over `chips` is compute-bound (equation 12)."""
    check_numbers(chips=chips)
    return chips * roofline.critical_intensity
