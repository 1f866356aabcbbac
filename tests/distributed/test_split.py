"""Which positions are whose, and parts of tensors there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Each, on_ranks
from torch import Tensor

import monoidreduce as mr
from monoidreduce.distributed.group import Group
from monoidreduce.distributed.split import Split

HANDLE: Any = None


@pytest.mark.parametrize(
    "length, layout, expected",
    (
        (6, "contiguous", [[(0, 2)], [(2, 4)], [(4, 6)]]),
        (7, "contiguous", [[(0, 3)], [(3, 6)], [(6, 7)]]),
        (2, "contiguous", [[(0, 1)], [(1, 2)], [(2, 2)]]),
        (0, "contiguous", [[(0, 0)]] * 3),
        (12, "zigzag", [[(0, 2), (10, 12)], [(2, 4), (8, 10)], [(4, 8)]]),
        (11, "zigzag", [[(0, 2), (10, 11)], [(2, 4), (8, 10)], [(4, 8)]]),
        (4, "zigzag", [[(0, 1)], [(1, 2)], [(2, 4)]]),
        (1, "zigzag", [[(0, 1)], [(1, 1)], [(1, 1)]]),
    ),
)
def test_spans(length: int, layout: str, expected: list[list[tuple[int, int]]]) -> None:
    splits = [Split.of(Group(HANDLE, rank, 3), length, layout) for rank in range(3)]
    assert [split.spans(rank) for rank, split in enumerate(splits)] == expected
    assert max(split.own for split in splits) == splits[0].longest


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_zigzag_gives_all_ranks_as_many_scores_of_a_causal_mask(ranks: int) -> None:
    split = Split.of(Group(HANDLE, 0, ranks), 2 * ranks * 5, "zigzag")
    scores = {sum(sum(range(1 + a, 1 + b)) for a, b in split.spans(rank)) for rank in range(ranks)}
    assert len(scores) == 1


def _there_and_back(group: Any, t: Tensor, dim: int, layout: str, length: Any, upstream: Tensor) -> Any:
    t = t.clone().requires_grad_()
    part = mr.distributed.shard(t, dim, group, layout=layout)
    whole = mr.distributed.unshard(part, dim, group, layout=layout, length=length)
    return part.detach(), whole.detach(), *torch.autograd.grad(whole, t, upstream)


@pytest.mark.parametrize("dim", (0, 1, -1))
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("length", (None, 12, 7, 2, 0))
def test_shard_and_unshard(length: int | None, layout: str, dim: int) -> None:
    sizes = [3, 3, 3]
    sizes[dim] = 12 if length is None else length
    t, upstream = torch.randn(sizes[::-1]).permute(2, 1, 0), torch.randn(sizes)
    found = on_ranks(3, _there_and_back, t, dim, layout, length, upstream)
    for _, whole, gradient in found:
        assert torch.equal(whole, t) and torch.equal(gradient, upstream)
    parts = [part for part, *_ in found]
    if layout == "contiguous":
        assert torch.equal(torch.cat(parts, dim), t)
    elif sizes[dim] == 12:
        chunks = t.chunk(6, dim)
        assert all(torch.equal(parts[i], torch.cat((chunks[i], chunks[5 - i]), dim)) for i in range(3))


def _error(group: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        getattr(mr.distributed, name)(*args, group, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name, args, options, expected",
    (
        ("shard", (torch.zeros(4), 1), {}, "dim: expected one of the 1 axes of tensor, got 1"),
        ("shard", (torch.zeros(4), 0), {"layout": "zag"}, "layout: expected one of contiguous, zigzag"),
        ("unshard", ("x", 0), {}, "tensor: expected a tensor, got 'x'"),
        ("unshard", (torch.zeros(4), 0), {"length": -1}, "length: expected None or an int >= 0, got -1"),
        ("unshard", (torch.zeros(3), 0), {"layout": "zigzag"}, "tensor: expected an even number"),
    ),
)  # fmt: skip
def test_errors(name: str, args: tuple[Any, ...], options: dict[str, Any], expected: str) -> None:
    assert all(text.startswith(expected) for text in on_ranks(2, _error, name, args, options))


def test_a_part_of_another_size() -> None:
    parts = Each([(torch.zeros(n), 0) for n in (3, 4)])
    errors = on_ranks(2, _error, "unshard", parts, {"length": 7})
    for rank, (own, text) in enumerate(zip((4, 3), errors, strict=True)):
        assert text.startswith(f"tensor: expected {own} positions on rank {rank} of 2, for length=7")
