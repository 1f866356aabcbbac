"""Collectives of states, and sums that are taken in the order of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, same_bits
from torch import Tensor

from monoidreduce.distributed.collectives import gather_states, sum_over_ranks
from monoidreduce.distributed.group import Group


def _sum(group: Any, part: Tensor, dtype: torch.dtype, options: Any) -> Tensor:
    return sum_over_ranks(part, Group.of(group), dtype, **options)


@pytest.mark.parametrize("shape", ((8, 3), (5,), (0, 3), (1,)))
def test_a_sum_is_in_the_order_of_ranks(shape: tuple[int, ...]) -> None:
    """Of numbers for which every order has other bits."""
    parts = [torch.randn(shape) * 10.0 ** (3 * i) for i in (2, 0, 3, 1)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(same_bits(on_ranks(4, _sum, Each(parts), torch.float32, {})), expected)


def test_a_rank_may_have_its_rows_of_a_sum() -> None:
    parts = [torch.randn(8, 3) for _ in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    found = on_ranks(4, _sum, Each(parts), torch.float32, {"own": True})
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("options", ({"sent": torch.bfloat16}, {}), ids=("sent", "given"))
def test_16_bit_parts_are_summed_in_float32_and_rounded_once(
    options: dict[str, Any], dtype: torch.dtype, ranks: int
) -> None:
    parts = [torch.randn(4000).bfloat16() for _ in range(ranks)]
    given = Each([p.float() for p in parts] if options else parts)
    expected = sum(p.float() for p in parts).to(dtype)
    assert torch.equal(same_bits(on_ranks(ranks, _sum, given, dtype, options)), expected)


def test_parts_of_ranks_may_differ_in_dtype() -> None:
    """Which kernels a rank's share takes, and in which dtype they sum, is its own affair."""
    parts = [torch.randn(40).bfloat16(), torch.randn(40)]
    expected = (parts[0].float() + parts[1]).bfloat16()
    assert torch.equal(same_bits(on_ranks(2, _sum, Each(parts), torch.bfloat16, {})), expected)


def _gathered(group: Any, fields: list[Tensor]) -> list[Tensor]:
    return gather_states(fields, Group.of(group))


def test_fields_of_any_dtype_are_gathered_by_one_collective() -> None:
    states = [
        [
            torch.randn(3).bfloat16(),
            torch.randn(2, 2).double(),
            torch.arange(3),
            torch.rand(5),
            torch.randn(()),
        ]
        for _ in range(3)
    ]
    for found in on_ranks(3, _gathered, Each(states)):
        for field, of_ranks in zip(found, zip(*states, strict=True), strict=True):
            assert torch.equal(field, torch.stack(of_ranks))


def test_an_empty_field_behind_an_odd_number_of_bytes() -> None:
    """Where no element of 8 bytes would begin."""
    states = [[torch.rand(3), torch.empty(0, 3, dtype=torch.int64)] for _ in range(2)]
    for found in on_ranks(2, _gathered, Each(states)):
        assert torch.equal(found[0], torch.stack([values for values, _ in states]))
        assert found[1].shape == (2, 0, 3) and found[1].dtype == torch.int64
