"""Statistics of a user's function with the columns split over ranks: numbers of columns are of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, over, same_bits, split
from specimens import name_of
from tolerance import accuracy_failures, upstream_gradient
from torch import Tensor

import monoidreduce as mr


@mr.statistics
def of_scores(score: Any, column: Any, label: Any, t: Any, w: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score * t + w)
    return {
        "lse": p.logsumexp,
        "mean": p.mean(score),
        "variance": p.variance(score),
        "target": mr.stat.total(torch.where(column == label, score, 0.0)),
        "weighted": mr.stat.total(torch.sigmoid(score) * w),
        "best": mr.stat.largest(score),
        "least": mr.stat.smallest(score),
        "most": mr.stat.largest(score * t, k=4),
        "above": mr.stat.count(score > 0),
    }


@mr.statistics
def of_two_scores(score: Any, other: Any) -> dict[str, Any]:
    p = mr.stat.softmax(other)
    return {"mean": p.mean(score - other), "q": mr.stat.softmax(score).logsumexp}


@mr.statistics
def of_vectors(score: Any, column: Any, v: Any) -> dict[str, Any]:
    p = mr.stat.softmax(torch.where(column % 5 != 1, score, -torch.inf))
    return {"lse": p.logsumexp, "mean": p.mean(v), "weighted": mr.stat.total(torch.sigmoid(score) * v)}


FUNCTIONS = {"one": of_scores, "two": of_two_scores, "vectors": of_vectors}
FLOATS = ("lse", "mean", "variance", "target", "weighted", "q")


def _inputs(name: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = {"a": torch.randn(rows, 12), "b": torch.randn(columns, 12) / 3}
    if name == "two":
        inputs |= {"other_a": torch.randn(rows, 7), "other_b": torch.randn(columns, 7) / 3}
    elif name == "vectors":
        inputs["v"] = torch.randn(columns, 6)
    else:
        inputs |= {"t": 0.5 + torch.rand(rows), "w": torch.randn(columns)}
        inputs["label"] = torch.randint(0, columns, (rows,))
        inputs["label"][5::7] = -100  # ignored
    return {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}


def _call(function: Any, tensors: dict[str, Tensor], **options: Any) -> Any:
    data = dict(tensors)
    row = {"row": {"t": data.pop("t")}} if "t" in data else {}
    column = {name: data.pop(name) for name in ("w", "v") if name in data}
    return function(**data, **row, column=column, **options)


def _results(found: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The differentiable ones, and the integers."""
    floats, integers = {}, {}
    for name, value in found._asdict().items():
        if isinstance(value, tuple):
            floats[name], integers[name] = value.value, value.index
        else:
            (floats if value.is_floating_point() else integers)[name] = value
    return floats, integers


def _differentiated(function: Any, tensors: dict[str, Tensor], upstream: list[Tensor], **options: Any) -> Any:
    leaves = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in tensors.items()}
    floats, integers = _results(_call(function, leaves, **options))
    wanted = {k: t for k, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(list(floats.values()), list(wanted.values()), upstream)
    return {k: t.detach() for k, t in floats.items()}, integers, dict(zip(wanted, grads, strict=True))


def _on_rank(group: Any, name: str, tensors: dict[str, Tensor], upstream: list[Tensor], options: Any) -> Any:
    return _differentiated(FUNCTIONS[name], tensors, upstream, **over(group, options))


def _without_and_with_group(group: Any, tensors: dict[str, Tensor], upstream: list[Tensor]) -> Any:
    alone = _differentiated(of_scores, tensors, upstream)
    return alone, _differentiated(of_scores, tensors, upstream, ranks=group)


OF_COLUMNS = ("b", "other_b", "w", "v")


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize(
    "name, ranks, columns", (("one", 2, 67), ("one", 4, 5), ("two", 3, 67), ("vectors", 2, 67))
)
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_statistics(name: str, ranks: int, columns: int, own_rows: bool, dtype: torch.dtype) -> None:
    rows = 384
    inputs = _inputs(name, rows, columns, dtype)
    parts = {
        k: split(t, 0, ranks) if k in OF_COLUMNS else list(t.chunk(ranks)) if own_rows else [t] * ranks
        for k, t in inputs.items()
    }
    reference = FUNCTIONS[name].reference
    wide = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    floats, integers = _results(_call(reference, inputs))
    upstream = [upstream_gradient(t) for t in floats.values()]
    ref = _differentiated(reference, wide, [g.double() for g in upstream])
    base = _differentiated(reference, inputs, upstream)
    of_ranks = [list(g.chunk(ranks)) if own_rows else [g] * ranks for g in upstream]
    found = on_ranks(
        ranks,
        _on_rank,
        name,
        Each([{k: p[rank] for k, p in parts.items()} for rank in range(ranks)]),
        Each([[g[rank] for g in of_ranks] for rank in range(ranks)]),
        {"classes": columns, "sequence_parallel": own_rows},
    )
    joined: Any = torch.cat if own_rows else same_bits
    failures = []
    for key, expected in ref[0].items():
        value = joined([of_rank[0][key] for of_rank in found])
        failures += accuracy_failures(key, value, expected, base[0][key], dtype, rows)
    for key, expected in integers.items():
        assert torch.equal(joined([of_rank[1][key] for of_rank in found]), expected), key
    for key, expected in ref[2].items():
        gradients = [of_rank[2][key] for of_rank in found]
        gradient = torch.cat(gradients) if key in OF_COLUMNS else joined(gradients)
        failures += accuracy_failures(f"d_{key}", gradient, expected, base[2][key], dtype, rows)
    assert not failures, "\n".join(failures)


def test_one_rank_has_the_bits_of_no_group() -> None:
    inputs = _inputs("one", 40, 67, torch.float32)
    upstream = [torch.randn_like(t) for t in _results(_call(of_scores, inputs))[0].values()]
    ((alone, found),) = on_ranks(1, _without_and_with_group, inputs, upstream)
    for of_alone, of_group in zip(alone, found, strict=True):
        for key, expected in of_alone.items():
            assert torch.equal(of_group[key], expected), key


def _short_captured(group: Any, a: Tensor, b: Tensor, columns: Tensor) -> str:
    @mr.statistics
    def weighted(score: Any, column: Any) -> dict[str, Any]:
        return {"total": mr.stat.total(score * columns[column])}

    try:
        weighted(a, b, ranks=group)
    except ValueError as error:
        return str(error)
    return "no error"


def _batched_columns(group: Any) -> str:
    try:
        of_two_scores(*(torch.randn(2, 3, 4) for _ in range(4)), ranks=group)
    except ValueError as error:
        return str(error)
    return "no error"


def test_batched_columns_are_refused() -> None:
    for text in on_ranks(2, _batched_columns):
        assert "b: expected shape [V, D] over ranks, got [2, 3, 4]" in text, text


def test_a_captured_tensor_that_is_too_short_is_refused_on_all_ranks() -> None:
    """Also on the first one, whose own columns it has numbers for."""
    parts = list(torch.randn(6, 5).chunk(2))
    for text in on_ranks(2, _short_captured, torch.randn(3, 5), Each(parts), torch.randn(4)):
        assert "expected 6 along an axis, got 4" in text, text


def _dropped(group: Any, a: Tensor, b: Tensor, own_rows: bool) -> Tensor:
    seed = torch.tensor(5)

    @mr.statistics
    def dropped(score: Any) -> dict[str, Any]:
        return {"total": mr.stat.total(torch.where(mr.stat.uniform(seed) < 0.5, score, 0.0))}

    options = {} if group is None else over(group, {"classes": 67, "sequence_parallel": own_rows})
    total: Tensor = dropped(a, b, **options).total
    return total


@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_random_numbers_are_those_of_the_whole_fold(own_rows: bool) -> None:
    a, b = torch.randn(8, 3, 5, dtype=torch.float64), torch.randn(67, 5, dtype=torch.float64)
    of_a = list(a.chunk(2)) if own_rows else [a, a]
    found = on_ranks(2, _dropped, Each(of_a), Each(split(b, 0, 2)), own_rows)
    joined = torch.cat(list(found)) if own_rows else same_bits(list(found))
    torch.testing.assert_close(joined, _dropped(None, a, b, False))


def _with_table(group: Any, a: Tensor, b: Tensor, table: Tensor, upstream: Tensor, own_rows: bool) -> Any:
    table = table.clone().requires_grad_()

    @mr.statistics
    def biased(score: Any, row: Any, column: Any) -> dict[str, Any]:
        return {"lse": mr.stat.softmax(score + table[row % 3, column]).logsumexp}

    options = {} if group is None else over(group, {"classes": 67, "sequence_parallel": own_rows})
    lse = biased(a, b, **options).lse
    return lse.detach(), torch.autograd.grad(lse, table, upstream)[0]


@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_a_tensor_indexed_by_row_and_column(own_rows: bool) -> None:
    """Every rank has the whole tensor, and its whole gradient."""
    a, b = torch.randn(8, 3, 5, dtype=torch.float64), torch.randn(67, 5, dtype=torch.float64)
    table, upstream = torch.randn(3, 67, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    of_a, of_g = (list(t.chunk(2)) if own_rows else [t, t] for t in (a, upstream))
    found = on_ranks(2, _with_table, Each(of_a), Each(split(b, 0, 2)), table, Each(of_g), own_rows)
    lse, gradient = zip(*found, strict=True)
    expected = _with_table(None, a, b, table, upstream, False)
    torch.testing.assert_close(torch.cat(lse) if own_rows else same_bits(list(lse)), expected[0])
    torch.testing.assert_close(same_bits(list(gradient)), expected[1])
