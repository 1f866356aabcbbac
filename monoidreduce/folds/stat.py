"""The statistics of a row of scores, for functions that `monoidreduce.statistics` traces.

    softmax(log_weight).logsumexp       log sum_j exp(log_weight_j)
    softmax(log_weight).mean(f)         sum_j exp(log_weight_j) f_j / sum_j exp(log_weight_j)
    softmax(log_weight).variance(f)     the mean of (f - mean of f)^2, in a second pass
    softmax(log_weight).entropy         -sum_j p_j log p_j, p_j = exp(log_weight_j - logsumexp)
    total(f)                            sum_j f_j
    largest(f), smallest(f)             the value, and the first column that has it
    largest(f, k), smallest(f, k)       the k largest or smallest values in order, and their columns
    count(condition)                    the number of columns for which it holds

    distance(x, y, p=2)                 for use in these: sum_k |x_k - y_k|^p of a row's and a column's vector
    uniform(seed)                       no statistic: a random number of the element

In `mean` and `total`, f may also be a payload: a datum of columns that has a vector [E] for each column, or a
number of the element times it. The result is then a vector.

Log weights may be of any size, because exponentials are relative to the largest one. An element with log
weight -inf is excluded. Without columns a log-sum-exp is -inf; a mean, a variance, an entropy, a total and a
count are 0; a largest value is -inf and its column -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from monoidreduce._results import exported
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.graph import Payload, Vector
from monoidreduce.folds.program.program import MOST

__all__ = [
    "Extremum",
    "Softmax",
    "Statistic",
    "count",
    "distance",
    "largest",
    "smallest",
    "softmax",
    "total",
    "uniform",
]


def __dir__() -> list[str]:
    """The public names, and the module's dunder names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


_graph: ContextVar[Any] = ContextVar("monoidreduce_graph", default=None)


@exported
class Extremum(NamedTuple):
    """The result of `largest` or `smallest`.

    value: [...], or [..., k] in order, in the accumulation dtype; differentiable, its gradient goes to the
        column `index`. Beyond the last column, -inf (inf if the smallest are wanted).
    index: [...] or [..., k] int64, the lowest column that has the value; -1 beyond the last column.
    """

    value: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index


@contextmanager
def building(graph: Any) -> Iterator[None]:
    """Context in which new statistics refer to this graph."""
    token = _graph.set(graph)
    try:
        yield
    finally:
        _graph.reset(token)


def _graph_for(name: str) -> Any:
    """The graph of the function that is being traced."""
    graph = _graph.get()
    if graph is None:
        raise TypeError(f"mr.stat.{name} is for functions decorated with mr.statistics; call that function")
    return graph


def _traced(name: str, value: Any, kind: str) -> int:
    """The number of the graph node of a statistic's argument, checked and converted to `kind`."""
    graph = _graph_for(name)
    expression = graph.expression(value)
    if kind == "bool":
        if expression.kind != "bool":
            _refuse(f"{name}: expected a condition, got a number: write {name}(x > 0), or total(x)")
        number: int = expression.number
        return number
    number = graph.real(expression).number
    return number


def _refuse(message: str) -> NoReturn:
    raise TraceError(message)


def _known_later(*_: Any) -> NoReturn:
    _refuse("a statistic is known when its row is done: use it outside, on what the call returns")


class _KnownLater:
    """Something that cannot be used inside an element's expression; every operator raises TraceError."""

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _known_later
    __pow__ = __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = (
        _known_later
    )
    __array_priority__ = 1

    def __repr__(self) -> str:
        return f"a {type(self).__name__.lower()}"

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        _known_later()


class Statistic(_KnownLater):
    """A statistic that a traced function returns.

    kind: its name. of, log_weight: numbers of graph nodes. payload: the datum of columns whose vectors it
    sums, with the factor `of`; None if it is of numbers. k: how many numbers it is; None if it is one.
    carried: the node whose value is wanted of the column with the largest `of`; None if that is `of`.
    """

    def __init__(
        self,
        kind: str,
        of: int,
        log_weight: int | None = None,
        payload: str | None = None,
        k: int | None = None,
        carried: int | None = None,
    ) -> None:
        self.kind, self.of, self.log_weight, self.payload, self.k = kind, of, log_weight, payload, k
        self.carried = carried

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _known_later()


class Softmax(_KnownLater):
    """The weights exp(log_weight) of a row's elements."""

    def __init__(self, log_weight: int) -> None:
        self._log_weight = log_weight

    @property
    def logsumexp(self) -> Any:
        """The logarithm of the sum of the weights."""
        return Statistic("logsumexp", self._log_weight, self._log_weight)

    @property
    def entropy(self) -> Any:
        """The entropy of the weights' distribution, in nats.

        However large the log weights are, it has the digits that `logsumexp` less their mean would lose.
        """
        return Statistic("entropy", self._log_weight, self._log_weight)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"a softmax has no {name}; it has logsumexp, entropy, mean(f) and variance(f)")

    def mean(self, f: Any) -> Any:
        """The mean of f by the weights. f may be a payload: then the mean is a vector."""
        if isinstance(f, Payload):
            return Statistic("mean", f.factor.number, self._log_weight, f.name)
        return Statistic("mean", _traced("mean", f, "real"), self._log_weight)

    def variance(self, f: Any) -> Any:
        """The mean of (f - mean of f)^2 by the weights; 0 without columns. It takes a second pass."""
        return Statistic("variance", _traced("variance", f, "real"), self._log_weight)


def softmax(log_weight: Any) -> Softmax:
    """The weights exp(log_weight), of any size. Several softmaxes of one function share a pass."""
    return Softmax(_traced("softmax", log_weight, "real"))


def total(f: Any) -> Any:
    """The sum of f over the columns. f may be a payload: then the sum is a vector."""
    if isinstance(f, Payload):
        return Statistic("total", f.factor.number, payload=f.name)
    return Statistic("total", _traced("total", f, "real"))


def largest(f: Any, k: int | None = None) -> Any:
    """The largest f, and the first column that has it; or the k largest, from 1 to 64, in order.

    NaN counts as the largest, as in torch. Of equal values the one of the lower column comes first. On
    tensor cores the pass over the scores finds k values; elsewhere torch does, in chunks of columns.
    """
    return Statistic("largest", _traced("largest", f, "real"), k=_checked_k("largest", k))


def _largest_by(f: Any, key: Any) -> Any:
    """The f of the column with the largest key, and that column (`Extremum`).

    f must be -inf where the key is: engines differ in whether a row of such keys alone has a largest.
    """
    return Statistic("largest", _traced("largest", key, "real"), carried=_traced("largest", f, "real"))


def smallest(f: Any, k: int | None = None) -> Any:
    """The smallest f, and the first column that has it; or the k smallest, from 1 to 64, in order.

    NaN counts as the smallest, as in torch. Of equal values the one of the lower column comes first. On
    tensor cores the pass over the scores finds k values; elsewhere torch does, in chunks of columns.
    """
    graph = _graph.get()
    of = _traced("smallest", f if graph is None else -graph.real(f), "real")
    return Statistic("smallest", of, k=_checked_k("smallest", k))


def _checked_k(name: str, k: int | None) -> int | None:
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST):
        _refuse(f"{name}: k: expected an int from 1 to {MOST}, got {k!r}")
    return k


def count(condition: Any) -> Any:
    """The number of columns for which the condition holds, int64."""
    return Statistic("count", _traced("count", condition, "bool"))


def distance(x: Any, y: Any, p: float = 2) -> Any:
    """sum_k |x_k - y_k|^p, a number of the element: the p-th power of the distance of two vectors.

        laplace = mr.stat.total(torch.exp(-mr.stat.distance(x, y, p=1)))  # row={"x": x}, column={"y": y}

    It is made of differences, so nothing cancels, as it does in |x|^2 - 2 <x, y> + |y|^2. Each coordinate is
    a datum of its row or column. So there are at most 64; of more, use that sum, with <x, y> as the score.

    Args:
        x: a datum of rows with a second axis, [..., D].
        y: a datum of columns, [V, D].
        p: more than 0.
    """
    graph = _graph_for("distance")
    if not isinstance(x, Vector) or not isinstance(y, Payload) or y.factor.constant != 1.0:
        _refuse(
            "distance(x, y): expected a datum of rows [..., D] and a datum of columns [V, D], as they are"
        )
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p < math.inf:
        _refuse(f"distance: p: expected a number more than 0, got {p!r}")
    if x.width > MOST:
        _refuse(
            f"distance: {x.name} has {x.width} coordinates, more than {MOST}: write the squared distance as "
            "|x|^2 - 2 score + |y|^2, with the norms as data of rows and columns"
        )
    total = graph.constant(0.0)
    for k in range(x.width):
        of_row, of_column = (("coordinate", each.name, k, x.width) for each in (x, y))
        apart = graph.data("row", "real", of_row) - graph.data("column", "real", of_column)
        total = total + (apart * apart if p == 2 else abs(apart) if p == 1 else abs(apart) ** p)
    return total


def uniform(seed: int | Tensor) -> Any:
    """A random number in (0, 1), of its own for each element: float32, an odd multiple of 2^-24.

        noisy = mr.stat.largest(score - torch.log(-torch.log(mr.stat.uniform(seed))))  # Gumbel-max

    It is a function of the seed, the leading indices of the row in `a`, and the column. So it is the same in
    forward and backward passes, on every device and in every dtype, and over ranks, which are given the same
    seed. Different seeds give independent numbers. It has no gradient. In functions of attention (score_mod,
    mask_mod, `attend`) rows have the indices [batch, heads, queries], and an int is part of the kernel.

    Args:
        seed: an int of 64 bits, or a 0-d tensor of an integer dtype, or an integer datum of rows: a seed for
            each row. Its values need no new kernels.
    """
    return _graph_for("uniform").uniform(seed)
