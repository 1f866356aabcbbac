"""The collectives that a plan counts equal a call's, in number, kind, order and bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, over

import monoidreduce as mr
from monoidreduce import plan
from monoidreduce.distributed import messages
from monoidreduce.theory.costs.sizes import call_of

Sent = list[tuple[str, int]]


def _dtype(operator: str, sizes: dict[str, Any]) -> torch.dtype:
    """One whose sums have another. But a CPU rounds no MLP's result before it is sent, as planned GPUs do."""
    return torch.float32 if operator == "mlp" and "gated" not in sizes else torch.bfloat16


def _counted(group: Any, operator: str, sizes: dict[str, Any], options: dict[str, Any]) -> list[Sent]:
    """What a rank sends in a later step, forward and backward, beside headers."""
    described, given = call_of(operator, sizes, _dtype(operator, sizes))
    made = [torch.zeros(t.shape, dtype=t.dtype) for t in described]
    if "gate" in given:
        given["gate"] = torch.zeros_like(given["gate"], device="cpu")
    leaves = made[:2] if operator == "linear_distillation" else [t for t in made if t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    options, sent = over(group, given | options), []
    ranks = dist.get_world_size(group)
    gather, exchange = messages._all_gather, dist.all_to_all_single

    def gathered(whole: Any, own: Any, **kwargs: Any) -> Any:
        sent.append(("all-gather", (ranks - 1) * (own.nbytes - messages.HEADER_BYTES)))
        return gather(whole, own, **kwargs)

    def exchanged(found: Any, parts: Any, **kwargs: Any) -> Any:
        sent.append(("all-to-all", (ranks - 1) * (parts.nbytes // ranks - messages.HEADER_BYTES)))
        return exchange(found, parts, **kwargs)

    def step() -> list[Sent]:
        sent.clear()
        result = getattr(mr, operator)(*made, **options)
        forward, sent[:] = [*sent], []
        if operator == "linear_log_probs":
            result = result.log_probs + (result.entropy if sizes.get("entropy") else 0)
        result.sum().backward()
        return [forward, [*sent]]

    with (
        mock.patch.object(messages, "_all_gather", gathered),
        mock.patch.object(dist, "all_to_all_single", exchanged),
    ):
        step(), step()  # of which the first one is after another call
        return step()


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    *(
        (operator, sizes, "columns", {"sequence_parallel": own_rows})
        for operator, sizes in (
            ("linear_cross_entropy", {"N": 24, "V": 36, "D": 16}),
            ("linear_distillation", {"N": 24, "V": 36, "D": 16, "E": 8}),
            ("linear_log_probs", {"N": 24, "V": 36, "D": 16}),
            ("linear_log_probs", {"N": 24, "V": 36, "D": 16, "entropy": True}),
            ("mlp", {"B": 24, "K": 36, "d": 8}),
            ("mlp", {"B": 24, "K": 36, "d": 8, "gated": True}),
        )
        for own_rows in (False, True)
    ),
    *(
        (
            "attention",
            {"B": 2, "H": 12, "Hkv": heads, "L": 48, "d": 8, "causal": True},
            split,
            {"layout": layout},
        )
        for heads in (1, 12)
        for split in ("ulysses", "all_gather")
        for layout in ("contiguous", "zigzag")
    ),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("operator", "sizes", "split", "options"), CASES)
def test_as_counted(
    operator: str, sizes: dict[str, Any], split: str, options: dict[str, Any], ranks: int
) -> None:
    if split == "columns":
        of_rank = {name: size // ranks if name in "VK" else size for name, size in sizes.items()}
        if options["sequence_parallel"]:
            of_rank |= {name: sizes[name] // ranks for name in "NB" if name in sizes}
    else:
        of_rank = sizes | {"L": sizes["L"] // ranks}
    given = options | ({} if split == "columns" else {"method": split})
    options = options | {"split": split, "dtype": _dtype(operator, sizes)}
    planned = plan.over_ranks(operator, sizes, ranks, "h200", **options)
    expected = [[(s.collective, s.bytes) for s in p.sends] for p in (planned.forward, planned.backward)]
    for found in on_ranks(ranks, _counted, operator, of_rank, given):
        assert found[0] == expected[0]
        assert sorted(found[1]) == sorted(expected[1])
