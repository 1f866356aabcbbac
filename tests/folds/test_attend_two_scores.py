"""attend with a weight of two scores: against float64 torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr

B, H, M, N, F, E, D = 2, 4, 21, 33, 8, 5, 6
F64 = torch.float64


def normal(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=F64)


def product(score: Any, other: Any) -> Any:
    return torch.sigmoid(score) * torch.tanh(other)


def weight_of(name: str, decay: Tensor, of_distance: Tensor) -> Callable[..., Any]:
    """decay: [H]. of_distance: [M + N]."""
    return {
        "product": product,
        "in another order": lambda other, score: score - 2.0 * other**2,
        "of indices": lambda score, other, head, q_idx, kv_idx: (
            (score + of_distance[q_idx - kv_idx + N - 1]) * torch.exp(-0.1 * decay[head] ** 2 * other.abs())
        ),
    }[name]


def leaves(device: torch.device | str = "cpu") -> list[Tensor]:
    """q, k, v, other_q and other_k, with several strides."""
    q, k, v = (
        normal(B, M, H, F, seed=1).transpose(1, 2),
        normal(B, 2, N, F, seed=2),
        normal(B, 2, N, 2 * D, seed=3),
    )
    other_q, other_k = normal(B, H, E, M, seed=4).mT, normal(B, 1, N, E, seed=5)
    moved = [t.to(device) for t in (q, k, v, other_q, other_k)]
    moved[2] = moved[2][..., ::2]
    return [t.detach().requires_grad_() for t in moved]


def dense(weight: Callable[..., Any], given: list[Tensor], keep: Tensor, normalized: bool) -> Tensor:
    q, k, v, other_q, other_k = given
    k, v, other_k = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v, other_k))
    shape = (B, H, M, N)
    axes = [
        torch.arange(n, device=q.device).view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate(shape)
    ]
    named = dict(zip(("batch", "head", "q_idx", "kv_idx"), axes, strict=True))
    named |= {"score": q @ k.mT * F**-0.5, "other": other_q @ other_k.mT * F**-0.5}
    names = weight.__code__.co_varnames[: weight.__code__.co_argcount]
    w = weight(**{name: named[name] for name in names}).masked_fill(~keep, 0)
    return (w @ v) / w.sum(-1, keepdim=True) if normalized else w @ v


def row_and_column(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.arange(M, device=device)[:, None], torch.arange(N, device=device)


@pytest.mark.parametrize("normalized", (False, True))
@pytest.mark.parametrize("name", ("product", "in another order", "of indices"))
@pytest.mark.parametrize("mask", ("all", "causal", "window", "mask_mod", "block_mask"))
def test_beside_torch(name: str, mask: str, normalized: bool, device: torch.device) -> None:
    i, j = row_and_column(device)
    first = i + N - M

    def keeps(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 3 != 1

    keep: Tensor
    options: dict[str, Any]
    keep, options = {
        "all": (i >= 0, {}),
        "causal": (j <= first, {"causal": True}),
        "window": ((j >= first - 9) & (j <= first + 2), {"window": (9, 2)}),
        "mask_mod": (keeps(0, 0, i, j), {"mask_mod": keeps}),
        "block_mask": (
            keeps(0, 0, i, j),
            {"block_mask": mr.block_mask(keeps, None, None, M, N, device=device, block_size=16)},
        ),
    }[mask]
    given = leaves(device)
    learned = [normal(n, seed=n).to(device).requires_grad_() for n in (H, M + N)]
    weight = weight_of(name, *learned)
    q, k, v, other_q, other_k = given
    found = mr.attend(
        q, k, v, weight=weight, normalized=normalized, other_q=other_q, other_k=other_k, **options
    )
    expected = dense(weight, given, keep, normalized)
    upstream = 3 * normal(B, H, M, D, seed=7).to(device)
    results = [
        (out, *torch.autograd.grad(out, given + learned, upstream, materialize_grads=True))
        for out in (found, expected)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_explain_says_that_torch_computes_it() -> None:
    q, k, v, other_q, other_k = leaves()
    call = {"weight": product, "other_q": other_q, "other_k": other_k}
    found = str(mr.explain("attend", q, k, v, **call))
    assert "torch computes payload sums of two scores, and their gradients, in chunks of columns" in found
    assert "a weight of two scores is a fold of monoidreduce.statistics, one a head" in found


def test_what_is_refused() -> None:
    q, k, v, other_q, other_k = leaves()
    with pytest.raises(ValueError, match="other_q, other_k: expected both or none, got a tensor and none"):
        mr.attend(q, k, v, weight=product, other_q=other_q)
    with pytest.raises(
        mr.TraceError, match="weight: expected a function of other and of arguments among score"
    ):
        mr.attend(q, k, v, weight=torch.sigmoid, other_q=other_q, other_k=other_k)
    with pytest.raises(ValueError, match=r"other_k: expected shape .*E=5.*, got \[2, 1, 33, 4\]"):
        mr.attend(q, k, v, weight=product, other_q=other_q, other_k=other_k[..., :4])
    with pytest.raises(ValueError, match=r"^other_k: expected a number of heads that divides the 4 of q"):
        mr.attend(q, k, v, weight=product, other_q=other_q, other_k=other_k.expand(B, 3, N, E))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_normalized_in_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Weights that float16 cannot hold: sums are in float32 until they are divided."""
    given = [t.detach().to(dtype) for t in leaves(device)]

    def weight(score: Any, other: Any) -> Any:
        return (8 * score) ** 6 + other**2

    q, k, v, other_q, other_k = given
    found = mr.attend(q, k, v, weight=weight, normalized=True, other_q=other_q, other_k=other_k)
    i, _ = row_and_column(device)
    expected = dense(weight, [t.double() for t in given], i >= 0, True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=2e-2)


@pytest.mark.parametrize("mask", ("all", "masked"))
def test_in_a_graph(mask: str) -> None:
    """Its weight may differ from call to call, capture tensors that learn, and be made in the graph."""
    given, learned = leaves(), [normal(n, seed=n).requires_grad_() for n in (H, M + N)]
    options: dict[str, Any] = {
        "causal": True,
        "normalized": True,
        "mask_mod": lambda b, h, i, j: (i + j) % 3 != 1,
    }

    def f(weight: Callable[..., Any] | None, *tensors: Tensor) -> Tensor:
        q, k, v, other_q, other_k = tensors
        scale = 0.5
        weight = weight or (lambda score, other: score * other - scale)
        of_mask = options if mask == "masked" else {}
        found: Tensor = mr.attend(q, k, v, weight=weight, other_q=2 * other_q, other_k=other_k, **of_mask)
        return found.sin()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for weight in (
        *(weight_of(name, *learned) for name in ("product", "of indices", "in another order")),
        None,
    ):
        found, expected = (
            (out, *torch.autograd.grad(out.sum(), given + learned, materialize_grads=True))
            for out in (compiled(weight, *given), f(weight, *given))
        )
        torch.testing.assert_close(found, expected)


def test_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mr.attend(q, k, v, weight=product, other_q=q, other_k=k)

    given = [t.detach() for t in leaves()[:3]]
    torch.testing.assert_close(torch.export.export(Layer(), tuple(given)).module()(*given), Layer()(*given))


def test_queries_of_width_0() -> None:
    q, other = torch.zeros(1, 1, 3, 0, dtype=F64), normal(1, 1, 3, 2, seed=1)
    found = mr.attend(
        q, q, other, weight=lambda score, other: torch.exp(score) * other, other_q=other, other_k=other
    )
    torch.testing.assert_close(found, (other @ other.mT) @ other)
