"""Functions of one element that several test files trace, and strategies for random ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import monoidreduce as mr
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.stat import _largest_by

stat = mr.stat
Inputs = dict[str, Any]


def token_stats(score, column, label):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    return dict(
        lse=p.logsumexp,
        mean=p.mean(score),
        target=stat.total(torch.where(column == label, score, 0.0)),
        best=stat.largest(score),
    )


def focal_pieces(score, column, label):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    target = stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=p.logsumexp, target=target, sum=stat.total(score), second=p.mean(score * score))


def siglip(score, column, label):  # type: ignore[no-untyped-def]
    return dict(loss=stat.total(F.softplus(torch.where(column == label, -score, score))))


def noisy_or(score):  # type: ignore[no-untyped-def]
    return dict(log_none=stat.total(-F.softplus(score)))


def tempered(score):  # type: ignore[no-untyped-def]
    p, q = stat.softmax(score), stat.softmax(score * 0.5)
    return dict(lse=p.logsumexp, half=q.logsumexp, gap=p.mean(torch.tanh(score)))


def reference_kl(score, other):  # type: ignore[no-untyped-def]
    p, q = stat.softmax(score), stat.softmax(other)
    return dict(
        lse=p.logsumexp,
        other_lse=q.logsumexp,
        forward=q.mean(other - score),
        reverse=p.mean(score - other),
        chi=q.mean((other - score) ** 2),
    )


def renyi(score, other):  # type: ignore[no-untyped-def]
    both = stat.softmax(0.5 * score + 0.5 * other)
    p, q = stat.softmax(score), stat.softmax(other)
    return dict(lse=p.logsumexp, other_lse=q.logsumexp, both=both.logsumexp)


def distances(score, squares, norms):  # type: ignore[no-untyped-def]
    """Statistics of distances between rows and columns, with row data and column data."""
    square = squares + norms - 2 * score
    near = stat.smallest(square)
    return dict(kernel=stat.total(torch.exp(-F.softplus(square))), near=near, within=stat.count(square < 4.0))


def attention(score, v):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    return dict(out=p.mean(v), lse=p.logsumexp)


def variances(score, column, label, w):  # type: ignore[no-untyped-def]
    p, q = stat.softmax(score), stat.softmax(torch.where(column == label, -torch.inf, 0.5 * score))
    return dict(
        lse=p.logsumexp,
        mean=p.mean(w * torch.tanh(score)),
        variance=p.variance(w * torch.tanh(score)),
        other=q.variance(torch.tanh(score) + w),
        total=stat.total(torch.sigmoid(score)),
    )


def entropies(score, column, label, w):  # type: ignore[no-untyped-def]
    p, q = stat.softmax(score), stat.softmax(torch.where(column == label, -torch.inf, w * score))
    return dict(
        others=q.entropy,
        lse=p.logsumexp,
        mean=q.mean(torch.tanh(score)),
        entropy=p.entropy,
        total=stat.total(torch.sigmoid(score)),
        best=stat.largest(score),
        above=stat.count(score > 0.5),
    )


def carried(score, column, label, w):  # type: ignore[no-untyped-def]
    """Of the column of a largest value another one is wanted; of a second largest value none."""
    shares = column != label
    key, value = (
        torch.where(shares, x, -torch.inf) for x in (w * torch.sigmoid(score) + 1.5, torch.tanh(w * score))
    )
    return dict(
        most=stat.largest(score),
        lse=stat.softmax(score).logsumexp,
        taken=_largest_by(value, key),
        entropy=stat.softmax(score).entropy,
        above=stat.count(score > 0.5),
    )


def ranked(score, column, label, w):  # type: ignore[no-untyped-def]
    return dict(
        lse=stat.softmax(score).logsumexp,
        best=stat.largest(torch.where(column == label, -torch.inf, w * score), k=7),
        least=stat.smallest(torch.tanh(score), k=3),
        total=stat.total(w * torch.sigmoid(score)),
    )


def vectors(score, column, label, bias, v, w):  # type: ignore[no-untyped-def]
    """Payload sums of several weights: two of the same ones, one of a masked softmax, two totals."""
    p, masked = stat.softmax(score + bias), stat.softmax(torch.where(column % 3 != 0, score, -torch.inf))
    return dict(
        mean=p.mean(v),
        other_mean=p.mean(w),
        masked=masked.mean(torch.tanh(score) * w),
        force=stat.total(torch.sigmoid(score) * -v / 2),
        hits=stat.total(torch.where(column == label, 1.0, 0.0) * v),
        best=stat.largest(score),
    )


def of_two_scores(score, other, v):  # type: ignore[no-untyped-def]
    p = stat.softmax(score + torch.tanh(other))
    return dict(out=p.mean(v), sum=stat.total(torch.sigmoid(other) * v), mean=p.mean(other))


# name -> (function, scores, row data, column data); a payload is a pair of its name and its width
FOLDS: dict[str, tuple[Any, int, tuple[str, ...], tuple[Any, ...]]] = {
    "token_stats": (token_stats, 1, (), ()),
    "focal_pieces": (focal_pieces, 1, (), ()),
    "siglip": (siglip, 1, (), ()),
    "noisy_or": (noisy_or, 1, (), ()),
    "tempered": (tempered, 1, (), ()),
    "reference_kl": (reference_kl, 2, (), ()),
    "renyi": (renyi, 2, (), ()),
    "distances": (distances, 1, ("squares",), ("norms",)),
    "variances": (variances, 1, (), ("w",)),
    "entropies": (entropies, 1, (), ("w",)),
    "carried": (carried, 1, (), ("w",)),
    "ranked": (ranked, 1, (), ("w",)),
    "attention": (attention, 1, (), (("v", 24),)),
    "vectors": (vectors, 1, (), ("bias", ("v", 5), ("w", 1))),
    "of_two_scores": (of_two_scores, 2, (), (("v", 7),)),
}


def fold_inputs(
    name: str,
    shape: tuple[int, ...] = (37,),
    columns: int = 211,
    width: int = 9,
    dtype: torch.dtype = torch.float64,
) -> tuple[Any, Inputs]:
    """A function and the tensors for a call of it. The tensors require gradients."""
    function, scores, row, column = FOLDS[name]
    of_data = torch.float64 if dtype == torch.float64 else torch.float32

    def leaf(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.float64).to(dtype).requires_grad_()

    call: Inputs = {"a": leaf(*shape, width), "b": leaf(columns, width)}
    if scores == 2:
        call |= {"other_a": leaf(*shape, width - 2), "other_b": leaf(columns, width - 2)}
    if "label" in mr.statistics(function)._names:
        call["label"] = torch.randint(-1, columns + 1, shape)
    if row:
        call["row"] = {name: leaf(*shape, dtype=of_data) for name in row}
    if column:
        call["column"] = {
            datum if isinstance(datum, str) else datum[0]: leaf(columns, dtype=of_data)
            if isinstance(datum, str)
            else leaf(columns, datum[1])
            for datum in column
        }
    return mr.statistics(function), call


def program_of(name: str) -> tuple[str, tuple[int, int, int, int]]:
    """The text of a function's program, and the numbers of data tensors of each kind in a call of it."""
    function, _, row, column = FOLDS[name]
    of_columns = dict(
        (datum, "real") if isinstance(datum, str) else (datum[0], "payload") for datum in column
    )
    traced = trace(function, dict.fromkeys(row, "real"), of_columns)
    rows, row_indices, columns, column_indices = (
        len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index")
    )
    return traced.text, (rows, row_indices, columns, column_indices)


def leaves_of(call: Inputs) -> list[torch.Tensor]:
    """The tensors of a call that require gradients."""
    tensors = [t for t in call.values() if isinstance(t, torch.Tensor)]
    for name in ("row", "column"):
        tensors += call.get(name, {}).values()
    return [t for t in tensors if t.requires_grad]


def outputs_of(result: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    return [t for each in result for t in (each if isinstance(each, tuple) else (each,))]


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Leaves of a call on a device, floating ones in a dtype."""
    if isinstance(value, dict):
        return {name: moved(t, device, dtype) for name, t in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.detach().to(device, dtype or value.dtype).requires_grad_(value.requires_grad)


def with_gradients(fold: Any, call: Inputs) -> list[torch.Tensor]:
    """The outputs of a call, then the gradients of a random linear combination of them."""
    outputs = outputs_of(fold(**call))
    generator = torch.Generator().manual_seed(0)
    real = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in real]
    leaves = leaves_of(call)
    if not real:
        return [*outputs, *map(torch.zeros_like, leaves)]
    return [
        *outputs,
        *torch.autograd.grad(real, leaves, upstream, materialize_grads=True, allow_unused=True),
    ]


# Random functions. An expression is a function of a dict from the arguments' names to their values.


def _unary(name: str) -> Any:
    functions: dict[str, Any] = {
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "exp": lambda x: torch.exp(torch.clamp(x, -4.0, 2.0)),
        "softplus": F.softplus,
        "abs": torch.abs,
        "relu": F.relu,
        "square": lambda x: torch.square(torch.clamp(x, -5.0, 5.0)),
        "log": lambda x: torch.log(0.5 + torch.square(x)),
        "log1p": lambda x: torch.log1p(torch.abs(x)),
        "sqrt": lambda x: torch.sqrt(1.0 + x * x),
        "erf": torch.erf,
        "gelu": F.gelu,
        "silu": F.silu,
        "logsigmoid": F.logsigmoid,
        "expm1": lambda x: torch.expm1(torch.clamp(x, -4.0, 2.0)),
        "neg": lambda x: -x,
        "reciprocal": lambda x: 1.0 / (1.5 + torch.tanh(x)),
    }
    return functions[name]


UNARY = (
    *("tanh", "sigmoid", "exp", "softplus", "abs", "relu", "square", "log", "log1p", "sqrt", "erf", "gelu"),
    *("silu", "logsigmoid", "expm1", "neg", "reciprocal"),
)
BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * torch.tanh(y),
    "div": lambda x, y: x / (1.0 + torch.abs(y)),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
CONDITIONS = {
    "less": lambda e, x, y: x < y,
    "label": lambda e, x, y: e["column"] == e["label"],
    "either": lambda e, x, y: (x >= y) | (e["column"] > e["row_number"]),
    "odd": lambda e, x, y: ~(e["column"] % 2 == 0) & (x != y),
}


@cache  # making and checking a strategy takes longer than a draw
def expressions(real: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Strategy for expressions in the element's real arguments with these names."""
    numbers = st.sampled_from((-1.5, -0.25, 0.5, 2.0))
    leaf = st.one_of(
        st.sampled_from(real).map(lambda name: lambda e: e[name]),
        st.tuples(st.sampled_from(real), numbers).map(lambda x: lambda e: e[x[0]] * x[1]),
        st.just(lambda e: e["column"] / 64 - 0.01 * e["row_number"]),
    )

    def extend(inner: Any) -> Any:
        def unary(x: Any) -> Any:
            name, of = x
            return lambda e: _unary(name)(of(e))

        def binary(x: Any) -> Any:
            name, left, right = x
            return lambda e: BINARY[name](left(e), right(e))

        def where(x: Any) -> Any:
            name, left, right = x
            return lambda e: torch.where(CONDITIONS[name](e, left(e), right(e)), left(e), right(e))

        return st.one_of(
            st.tuples(st.sampled_from(UNARY), inner).map(unary),
            st.tuples(st.sampled_from(sorted(BINARY)), inner, inner).map(binary),
            st.tuples(st.sampled_from(sorted(CONDITIONS)), inner, inner).map(where),
        )

    return st.recursive(leaf, extend, max_leaves=8)


class Fold:
    """A function of scores, a row's real number t and a column's w, and its number of scores."""

    def __init__(self, function: Any, scores: int) -> None:
        self.function, self.scores = function, scores

    def __repr__(self) -> str:
        return f"Fold of {self.scores} scores: {trace(self.function, {'t': 'real'}, {'w': 'real'}).text}"


@st.composite
def random_folds(draw: Any, scaled_data: bool = False) -> Fold:
    """A random function of one or two scores, of constants and of row and column data.

    All weights and totals depend on the score. Otherwise all rows would have the same sums, and the largest
    error of a call would be the error of one number.

    scaled_data: multiply data by a function of the score. Otherwise some gradients of data are sums of equal
    terms, which torch adds pairwise with next to no error.
    """
    scores = draw(st.sampled_from((1, 1, 2)))
    real = ("score", "other", "t", "w") if scores == 2 else ("score", "t", "w")
    expression = expressions(real)
    of_softmax = st.tuples(expression, st.lists(expression, max_size=3), st.booleans())
    softmaxes = draw(st.lists(of_softmax, max_size=2))
    totals = draw(st.lists(expression, max_size=2))
    largest = draw(st.lists(st.tuples(st.booleans(), expression), max_size=2))
    counts = draw(st.lists(st.tuples(st.sampled_from(sorted(CONDITIONS)), expression), max_size=1))
    if not (softmaxes or totals or largest or counts):
        totals = [draw(expression)]

    def build(e: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, (log_weight, means, has_entropy) in enumerate(softmaxes):
            p = stat.softmax(log_weight(e) + e["score"] / 8)
            found[f"lse{i}"] = p.logsumexp
            if has_entropy:
                found[f"entropy{i}"] = p.entropy
            found |= {f"mean{i}_{k}": p.mean(f(e)) for k, f in enumerate(means)}
        found |= {f"total{i}": stat.total(f(e) + e["score"] / 8) for i, f in enumerate(totals)}
        for i, (up, f) in enumerate(largest):
            found[f"extreme{i}"] = stat.largest(f(e)) if up else stat.smallest(f(e))
        found |= {
            f"count{i}": stat.count(CONDITIONS[name](e, f(e), 0.25)) for i, (name, f) in enumerate(counts)
        }
        return found

    def scaled(data: Any, score: Any) -> Any:
        return data * (1 + score / 64) if scaled_data else data

    def one(score, row, column, label, t, w):  # type: ignore[no-untyped-def]
        arguments = {"score": score, "row_number": row, "column": column, "label": label}
        return build({**arguments, "t": scaled(t, score), "w": scaled(w, score)})

    def two(score, other, row, column, label, t, w):  # type: ignore[no-untyped-def]
        arguments = {"score": score, "other": other, "row_number": row, "column": column, "label": label}
        return build({**arguments, "t": scaled(t, score), "w": scaled(w, score)})

    return Fold(two if scores == 2 else one, scores)
