"""How large a batch should be (paper, Appendix E, after McCandlish et al. 2018).

Batch sizes are in samples or in tokens; noise scales are in the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from monoidreduce._validate import mismatch
from monoidreduce.theory.plan._positive import check_numbers

__all__ = [
    "Pareto",
    "QuadraticModel",
    "Schedule",
    "batch_schedule",
    "covariance_preserving_rate",
    "estimate_noise",
    "fit_pareto",
    "linear_rate",
]

Scalar = TypeVar("Scalar", float, Tensor)


@dataclass(frozen=True)
class QuadraticModel:
    """The loss around the parameters to second order (E.1); g is the gradient, H the Hessian.

    Attributes:
        squared_gradient: |g|^2.
        curvature: g^T H g, positive.
        noise: tr(H Sigma), where Sigma is the covariance of one sample's gradient.
    """

    squared_gradient: float
    curvature: float
    noise: float

    def __post_init__(self) -> None:
        check_numbers(squared_gradient=self.squared_gradient, curvature=self.curvature, noise=self.noise)

    @classmethod
    def of(cls, gradient: Tensor, hessian: Tensor, covariance: Tensor) -> QuadraticModel:
        """The model for g [P], H [P, P] and Sigma [P, P]."""
        return cls(
            (gradient @ gradient).item(),
            (gradient @ hessian @ gradient).item(),
            (hessian * covariance.T).sum().item(),
        )

    @property
    def noise_scale(self) -> float:
        """B_noise = tr(H Sigma) / (g^T H g) (below equation 18)."""
        return self.noise / self.curvature

    def loss_reduction(self, batch: float = math.inf) -> float:
        """The largest expected decrease of the loss in a step: Delta_max / (1 + B_noise / B) (equations 17,
        18).

        Delta_max = |g|^4 / (2 g^T H g).
        """
        return self.squared_gradient**2 / (2 * self.curvature) / (1 + self.noise_scale / batch)

    def learning_rate(self, batch: float = math.inf) -> float:
        """The learning rate of that step: eta_max / (1 + B_noise / B) (equation 19).

        eta_max = |g|^2 / (g^T H g).
        """
        return self.squared_gradient / self.curvature / (1 + self.noise_scale / batch)


def covariance_preserving_rate(batch: float, base_rate: float, base_batch: float) -> float:
    """sqrt(r B), r = eta_0^2 / B_0: keeps the covariance of an update equal to the base run's (E.1.1)."""
    check_numbers(batch=batch, base_rate=base_rate, base_batch=base_batch)
    return base_rate * math.sqrt(batch / base_batch)


def linear_rate(batch: float, base_rate: float, base_batch: float) -> float:
    """eta_0 B / B_0: keeps the progress per sample while B is far below B_noise (E.1.1)."""
    check_numbers(batch=batch, base_rate=base_rate, base_batch=base_batch)
    return base_rate * batch / base_batch


def estimate_noise(
    small_squared_norm: Scalar, big_squared_norm: Scalar, small: float, big: float
) -> tuple[Scalar, Scalar]:
    """tr(Sigma) and |g|^2, from squared norms of gradients of `small` and of `big` samples (E.3, estimation).

    E|g(B)|^2 = |g|^2 + tr(Sigma) / B, so two batch sizes determine both terms. The estimates are unbiased, so
    either may be negative. Average each over steps, then divide: the ratio is B_simple (footnote 17).

    Raises ValueError unless 0 < small < big.
    """
    check_numbers(small=small, big=big)
    if small >= big:
        raise ValueError(mismatch("small", f"less than big {big}", small))
    return (
        (small_squared_norm - big_squared_norm) / (1 / small - 1 / big),
        (big * big_squared_norm - small * small_squared_norm) / (big - small),
    )


@dataclass(frozen=True)
class Pareto:
    """The trade-off between steps and samples to reach a loss, as a function of the batch size (E.2).

    Attributes:
        least_steps: S_min, the steps with infinitely large batches.
        least_samples: E_min, the samples with infinitely small batches.
    """

    least_steps: float
    least_samples: float

    def __post_init__(self) -> None:
        check_numbers(least_steps=self.least_steps, least_samples=self.least_samples)

    @property
    def critical_batch(self) -> float:
        """B_crit = E_min / S_min (equation 23); equal to B_noise if that is constant (equation 20)."""
        return self.least_samples / self.least_steps

    def steps(self, batch: float) -> float:
        """S = S_min + E_min / B (equation 21)."""
        return self.least_steps + self.least_samples / batch

    def samples(self, batch: float) -> float:
        """E = B S_min + E_min (equation 22)."""
        return batch * self.least_steps + self.least_samples


def fit_pareto(pairs: Sequence[tuple[float, float]]) -> Pareto:
    """Fit S_min and E_min to measured (steps, samples), one pair per batch size (equation 24).

    With B = E / S, equation 24 is S = S_min + E_min / B. The logarithms of both sides are fitted by least
    squares, which suits errors relative to S. The logarithm of S / S_min - 1 would not exist for every
    measurement, and would magnify errors at the ends of the curve.

    Raises ValueError unless at least two pairs differ in batch size and the fitted values are positive.
    """
    for number, (steps, samples) in enumerate(pairs):
        check_numbers(**{f"pairs[{number}] steps": steps, f"pairs[{number}] samples": samples})
    if len({samples / steps for steps, samples in pairs}) < 2:
        raise ValueError(mismatch("pairs", "(steps, samples) of at least two batch sizes", list(pairs)))
    # Gauss-Newton on the logarithms of both values, which keeps them positive.
    least_steps = min(steps for steps, _ in pairs)
    least_samples = min(samples for _, samples in pairs)
    for _ in range(100):
        aa = ab = bb = ar = br = 0.0
        for steps, samples in pairs:
            by_batch = least_samples * steps / samples
            predicted = least_steps + by_batch
            a, b, residual = least_steps / predicted, by_batch / predicted, math.log(steps / predicted)
            aa, ab, bb, ar, br = aa + a * a, ab + a * b, bb + b * b, ar + a * residual, br + b * residual
        determinant = aa * bb - ab * ab
        if determinant <= 1e-15 * aa * bb:  # one of the values goes to 0
            break
        change = (bb * ar - ab * br) / determinant, (aa * br - ab * ar) / determinant
        least_steps *= math.exp(min(max(change[0], -1), 1))
        least_samples *= math.exp(min(max(change[1], -1), 1))
        if max(map(abs, change)) < 1e-12:
            return Pareto(least_steps, least_samples)
    raise ValueError(mismatch("pairs", "steps that fall and samples that grow with the batch", list(pairs)))


@dataclass(frozen=True)
class Schedule:
    """Batch sizes of the units of a run (see `batch_schedule`), and their cost.

    Attributes:
        batches: B(s).
        steps: S, the sum of 1 + B_noise / B (equation 25).
        samples: E, the sum of B + B_noise (equation 25).
    """

    batches: tuple[float, ...]
    steps: float
    samples: float

    @classmethod
    def of(cls, batches: Sequence[float], noise_scales: Sequence[float]) -> Schedule:
        return cls(
            tuple(batches),
            sum(1 + noise / batch for batch, noise in zip(batches, noise_scales, strict=True)),
            sum(batch + noise for batch, noise in zip(batches, noise_scales, strict=True)),
        )


def batch_schedule(noise_scales: Sequence[float], steps: float) -> Schedule:
    """The schedule with the fewest samples among all that take `steps` steps (equation 26).

    B(s) = sqrt(lambda B_noise(s)), with sqrt(lambda) = sum sqrt(B_noise) / (S - S_min) from equation 25.

    noise_scales: B_noise of each unit of the run. A unit is the progress of one step with an infinite batch,
    so S_min is the number of units.

    Raises ValueError unless noise scales are positive and steps is above S_min.
    """
    check_numbers(**{f"noise_scales[{unit}]": noise for unit, noise in enumerate(noise_scales)}, steps=steps)
    if not 0 < len(noise_scales) < steps:
        raise ValueError(mismatch("steps", f"more than S_min, {len(noise_scales)}", steps))
    root = sum(map(math.sqrt, noise_scales)) / (steps - len(noise_scales))
    return Schedule.of([root * math.sqrt(noise) for noise in noise_scales], noise_scales)
