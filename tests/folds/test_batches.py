"""Batched columns of `statistics`: a [..., N, D] with b [..., V, D]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import hardware
from monoidreduce._ops.dry_run import dry_run

LEADING = ((3,), (1,), (2, 3), (0,))
table = torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10)


@mr.statistics
def of_batch(
    score: Any, other: Any, row: Any, column: Any, label: Any, t: Any, w: Any, k: Any, v: Any
) -> Any:
    p = mr.stat.softmax(score * t + w + table[0, column] - table[1, row])
    return {
        "lse": p.logsumexp,
        "mean": p.mean(other),
        "spread": p.variance(score),
        "out": p.mean(v),
        "target": mr.stat.total(torch.where(column == label, score * k, 0.0)),
        "best": mr.stat.largest(score),
        "above": mr.stat.count(other > 0),
    }


def inputs(leading: tuple[int, ...]) -> dict[str, Any]:
    """Five rows and seven columns in each batch; tensors that are not contiguous."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, 2, dtype=torch.float64)[..., 0].requires_grad_()

    return {
        "a": normal(*leading, 5, 3),
        "b": normal(*leading, 7, 3),
        "other_a": normal(*leading, 5, 2),
        "other_b": normal(*leading, 7, 2),
        "label": torch.randint(-1, 7, (*leading, 5)).masked_fill(torch.rand(*leading, 5) < 0.2, -100),
        "row": {"t": normal(*leading, 5)},
        "column": {
            "w": normal(*leading, 7),
            "k": torch.arange(7).expand(*leading, 7),
            "v": normal(*leading, 7, 4),
        },
    }


def flat(results: Any) -> list[Tensor]:
    return [t for each in results for t in (each if isinstance(each, tuple) else (each,))]


def of_each(call: dict[str, Any], leading: tuple[int, ...]) -> list[Tensor]:
    """The results of a call for each batch."""

    def at(value: Any, i: int) -> Any:
        if isinstance(value, dict):
            return {name: at(t, i) for name, t in value.items()}
        return value.flatten(0, len(leading) - 1)[i]

    count = torch.Size(leading).numel()
    parts = [flat(of_batch(**{name: at(value, i) for name, value in call.items()})) for i in range(count)]
    return [torch.stack(of_parts).unflatten(0, leading) for of_parts in zip(*parts, strict=True)]


def leaves_of(call: dict[str, Any]) -> list[Tensor]:
    given = [*call.values(), *call["row"].values(), *call["column"].values()]
    return [t for t in given if isinstance(t, Tensor) and t.requires_grad]


def gradients(results: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    real = [t for t in results if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in real]
    return torch.autograd.grad(real, leaves, upstream)


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_each_batch_is_a_call(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    call = inputs(leading)
    found = flat(of_batch(**call))
    assert [t.shape for t in found] == [(*leading, 5), (*leading, 5), (*leading, 5), (*leading, 5, 4)] + [
        (*leading, 5)
    ] * 4
    reference = flat(of_batch.reference(**call))
    leaves = leaves_of(call)
    if 0 not in leading:
        for x, y in zip(found, of_each(call, leading), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(
        (*found, *gradients(found, leaves)), (*reference, *gradients(reference, leaves)), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_attention_of_batches_is_one_call_of_attention() -> None:
    @mr.statistics
    def attend(score: Any, v: Any) -> dict[str, Any]:
        p = mr.stat.softmax(score)
        return {"out": p.mean(v), "lse": p.logsumexp}

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    found = attend(q, k, column={"v": v}, scale=0.5)
    out, lse = mr.attention(q, k, v, scale=0.5, return_lse=True)
    assert torch.equal(found.out, out) and torch.equal(found.lse, lse)


@pytest.mark.parametrize(
    "name, shape, expected",
    (
        ("b", (3, 7, 3), r"^b: expected shape \[V, D\], or \[2, V, D\] as a is \[2, 5, 3\], got \[3, 7, 3\]"),
        ("b", (2, 1, 7, 3), r"^b: expected shape \[V, D\], or \[2, V, D\]"),
        ("other_b", (7, 2), r"^other_b: expected shape \[V, D\], or \[2, V, D\]"),
        ("other_b", (2, 8, 2), r"^other_b: expected shape"),
    ),
)
def test_shapes_are_checked(name: str, shape: tuple[int, ...], expected: str) -> None:
    call = inputs((2,)) | {name: torch.randn(*shape, dtype=torch.float64)}
    with pytest.raises(ValueError, match=expected):
        of_batch(**call)


def test_data_of_columns_have_their_batches() -> None:
    call = inputs((2,))
    call["column"]["w"] = torch.randn(7, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"column\['w'\]: expected shape \[2, 7\], or \[2, 7, E\]"):
        of_batch(**call)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("width", (64, 512))
@pytest.mark.parametrize("gpu", ("a100", "h100"))
def test_one_pass_for_all_batches_where_rows_fit_into_shared_memory(
    gpu: str, width: int, dtype: torch.dtype
) -> None:
    """On Hopper, for 16-bit operands that are narrow enough. Other calls fold one batch after the other. The
    folds have no vectors to sum, or vectors without elements."""

    @mr.statistics
    def numbers(score: Any) -> Any:
        return dict(lse=mr.stat.softmax(score).logsumexp, mean=mr.stat.softmax(score).mean(score))

    @mr.statistics
    def vectors(score: Any, v: Any) -> Any:
        p = mr.stat.softmax(score)
        return dict(lse=p.logsumexp, out=p.mean(score * v))

    a, b = (torch.empty(2, n, width, dtype=dtype, device="meta") for n in (200, 300))
    fits = (gpu, width, dtype) == ("h100", 64, torch.bfloat16)
    for fold, data in ((numbers, {}), (vectors, {"column": {"v": b[..., :0]}})):
        call = {"a": a, "b": b, **data}
        run = dry_run(fold, call, (), hardware.find(gpu).facts())
        launched = [each.name for each in run.launches if each.name.startswith("statistics")]
        assert launched == (["statistics_payload"] if fits else ["statistics_fold"] * 2)
