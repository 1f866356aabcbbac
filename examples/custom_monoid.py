"""A monoid of your own: mean and variance of each row of scores that are never stored.

Three methods are all there is to write. check_monoid tries the laws and says which one
a mistake breaks.
"""

from typing import NamedTuple

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr


class Moments(mr.Monoid):
    """The count of numbers, their mean, and the sum of their squared deviations."""

    class State(NamedTuple):
        number: Tensor  # [*batch]
        mean: Tensor  # [*batch]
        deviation: Tensor  # [*batch]

    def identity(self, like: State) -> State:
        return self.State(*map(torch.zeros_like, like))

    def combine(self, a: State, b: State) -> State:
        number = a.number + b.number
        share_a, share_b = (
            part.number.to(part.mean) / number.clamp(min=1) for part in (a, b)
        )
        mean = share_a * a.mean + share_b * b.mean
        between = a.number * share_b * (a.mean - b.mean) ** 2
        return self.State(number, mean, a.deviation + b.deviation + between)

    def local_gradient(self, c: State, a: State, g: State) -> State:
        """Depends on c and a alone, so the fold has a backward pass."""
        to_mean = a.number.to(a.mean) / c.number.clamp(min=1)
        to_deviation = 2 * a.number * (a.mean - c.mean)
        return self.State(
            torch.zeros_like(a.number),
            g.mean * to_mean + g.deviation * to_deviation,
            g.deviation,
        )


def samples(generator: torch.Generator, shape: tuple[int, ...]) -> Moments.State:
    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    return Moments.State(
        torch.randint(1, 9, shape, generator=generator), normal(), normal() ** 2
    )


def project_fold(a: Tensor, b: Tensor) -> Moments.State:
    scores = a @ b.T
    variance, mean = torch.var_mean(scores, dim=1, correction=0)
    number = torch.full_like(mean, len(b), dtype=torch.int64)
    return Moments.State(number, mean, variance * len(b))


def variance(a: Tensor, b: Tensor) -> Tensor:
    state = mr.map_reduce(Moments(), project_fold, a, b, a_chunk=256, b_chunk=512)
    return state.deviation / state.number


def plain(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T).var(dim=1, correction=0)


class Forgetful(Moments):
    """A mistake: the deviation between the two means is left out."""

    def combine(self, a: Moments.State, b: Moments.State) -> Moments.State:
        return super().combine(a, b)._replace(deviation=a.deviation + b.deviation)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    print(mr.check_monoid(Moments(), samples), end="\n\n")
    try:
        mr.check_monoid(Forgetful(), samples)
    except mr.MonoidLawError as error:
        print(error, end="\n\n")
    compare(variance, plain, {"a": torch.randn(1000, 64), "b": torch.randn(1500, 64)})
