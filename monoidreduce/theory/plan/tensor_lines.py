"""Tensor parallelism of Y = X W_up W_down, line by line (paper, Appendix D), with two bytes per element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.collectives import sent
from monoidreduce.theory.plan.roofline import Work
from monoidreduce.theory.plan.strategies import Phases

__all__ = ["Algorithm", "Line", "all_gather_version", "all_reduce_version"]

BF16 = 2


@dataclass(frozen=True)
class Line:
    """A matrix product or a collective of one chip.

    Attributes:
        operation: as Appendix D writes it; gX is the gradient of X.
        work: FLOPs of a product, or bytes that a collective sends.
        blocking: whether the next line waits for this collective.
    """

    operation: str
    work: Work
    blocking: bool = False


@dataclass(frozen=True)
class Algorithm:
    """The operations of both phases; `str()` lists them."""

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]

    @property
    def phases(self) -> Phases:
        """The sums of the lines."""
        return Phases(_total(self.forward), _total(self.backward))

    def __str__(self) -> str:
        return "\n".join([*_listed("forward", self.forward), *_listed("backward", self.backward)])


def _listed(title: str, lines: Iterable[Line]) -> Iterator[str]:
    yield f"{title:<34}{'FLOPs':>12}{'bytes':>12}"
    for line in lines:
        blocking = "  blocking" if line.blocking else ""
        yield f"  {line.operation:<32}{line.work.flops:>12.4g}{line.work.bytes:>12.4g}{blocking}"


def _total(lines: Iterable[Line]) -> Work:
    return sum((line.work for line in lines), Work(0, 0))


def all_reduce_version(tokens: float, width: float, hidden: float, chips: float) -> Algorithm:
    """Appendix D.1: every chip holds X [tokens, width] and the whole gradient of Y."""
    check_numbers(tokens=tokens, width=width, hidden=hidden, chips=chips)
    product = Work(2 * tokens * width * hidden / chips, 0)
    all_reduce = Work(0, sent("all-reduce", BF16 * tokens * width))
    return Algorithm(
        forward=(
            Line("H_i = X W_up,i", product),
            Line("Y_i = H_i W_down,i", product),
            Line("Y = AllReduce(Y_i)", all_reduce, blocking=True),
        ),
        backward=(
            Line("gH_i = gY W_down,i^T", product),
            Line("gW_down,i = H_i^T gY", product),
            Line("gX_i = gH_i W_up,i^T", product),
            Line("gX = AllReduce(gX_i)", all_reduce),
            Line("gW_up,i = X^T gH_i", product),
        ),
    )


def all_gather_version(tokens: float, width: float, hidden: float, chips: float) -> Algorithm:
    """Appendix D.2: every chip holds 1/chips of X and of the gradient of Y, [tokens, width / chips].

    The gathered X is saved for backward. Without that, backward would gather it again: 2 B d bytes more.
    """
    check_numbers(tokens=tokens, width=width, hidden=hidden, chips=chips)
    product = Work(2 * tokens * width * hidden / chips, 0)
    gather = Work(0, sent("all-gather", BF16 * tokens * width))
    scatter = Work(0, sent("reduce-scatter", BF16 * tokens * width))
    return Algorithm(
        forward=(
            Line("X = AllGather(X_i)", gather, blocking=True),
            Line("H_i = X W_up,i", product),
            Line("Y_i = H_i W_down,i", product),
            Line("Y_i = ReduceScatter(Y_i)", scatter, blocking=True),
        ),
        backward=(
            Line("gY = AllGather(gY_i)", gather, blocking=True),
            Line("gH_i = gY W_down,i^T", product),
            Line("gW_down,i = H_i^T gY", product),
            Line("gX_i = gH_i W_up,i^T", product),
            Line("gX_i = ReduceScatter(gX_i)", scatter),
            Line("gW_up,i = X^T gH_i", product),
        ),
    )
