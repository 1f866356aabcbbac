"""linear_topk and linear_sample over ranks: the classes, samples and gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import head_inputs, kept_classes, packed
from ranks import Each, on_ranks, over, same_bits, split
from torch import Tensor

import monoidreduce as mr

CLASSES, ROWS = 67, 12


def _called(group: Any, tensors: dict[str, Tensor], kept: Tensor | None, options: dict[str, Any]) -> Any:
    """Results of both, and gradients of x, weight and bias."""
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    of_ranks = {} if group is None else over(group, options)
    topk = mr.linear_topk(**leaves, k=5, temperature=0.8, **of_ranks)
    sample = mr.linear_sample(
        **leaves, seed=9, temperature=0.8, softcap=9.0, kept=kept, entropy=True, **of_ranks
    )
    assert sample.entropy is not None
    reached = torch.where(sample.index >= 0, sample.log_prob, 0.0)
    loss = (topk.log_probs * torch.arange(5)).sum() + topk.lse.sum() + (reached - 0.1 * sample.entropy).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return [t.detach() for t in (*topk, *sample)], dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("kept", (False, True), ids=("all_classes", "kept"))
def test_over_ranks(kept: bool, ranks: int, own_rows: bool) -> None:
    inputs = head_inputs(ROWS, CLASSES, dtype=torch.float64, device=torch.device("cpu"), bias=True)
    words = packed(kept_classes((ROWS,), CLASSES, torch.device("cpu"))) if kept else None
    expected, gradients = _called(None, inputs, words, {})

    def of_each(t: Tensor | None) -> list[Any]:
        return [None] * ranks if t is None else [*t.chunk(ranks)] if own_rows else [t] * ranks

    parts = {
        "x": of_each(inputs["x"]),
        **{name: split(inputs[name], 0, ranks) for name in ("weight", "bias")},
    }
    found = on_ranks(
        ranks,
        _called,
        Each([{name: of[rank] for name, of in parts.items()} for rank in range(ranks)]),
        Each(of_each(words)),
        {"classes": CLASSES, "sequence_parallel": own_rows},
    )
    joined: Any = torch.cat if own_rows else same_bits
    for number, whole in enumerate(expected):
        result = joined([of_rank[0][number] for of_rank in found])
        torch.testing.assert_close(result, whole, rtol=1e-10, atol=1e-10)
    for name, whole in gradients.items():
        shards = [of_rank[1][name] for of_rank in found]
        result = joined(shards) if name == "x" else torch.cat(shards)
        torch.testing.assert_close(result, whole, rtol=1e-9, atol=1e-9)


def _refused(group: Any, x: Tensor, weight: Tensor, wrong: dict[str, Any]) -> str:
    options: dict[str, Any] = {"seed": 1, **wrong}
    try:
        mr.linear_sample(x, weight, **options, ranks=mr.Ranks(group, classes=6))
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("wrong", "text"),
    (
        ({"kept": torch.zeros(4, 2, dtype=torch.int32)}, "kept: expected shape [4, 1]"),
        ({"temperature": -1.0}, "temperature"),
    ),
)
def test_an_error_of_one_rank_is_raised_on_all(wrong: dict[str, Any], text: str) -> None:
    x, parts = torch.randn(4, 5), list(torch.randn(6, 5).chunk(2))
    for found in on_ranks(2, _refused, x, Each(parts), Each([{}, wrong])):
        assert text in found, found
