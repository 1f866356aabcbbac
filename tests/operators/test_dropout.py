"""Dropout of attention: torch's, by random numbers that are functions of the element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dropout import dropped, factors
from specimens import name_of
from tolerance import accuracy_failures
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr

B, H, M, N, F, D = 2, 4, 37, 53, 16, 12
SEED = 1234


def inputs(dtype: torch.dtype, key_heads: int = H, rows: int = M, columns: int = N) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, rows, F), (B, key_heads, columns, F), (B, key_heads, columns, D))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def slopes(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - (h + 1) * abs(i - j) * 0.0625


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i // 20 == j // 20


torch.manual_seed(1)
BIAS = torch.randn(1, H, M, N)
PADDING = torch.arange(N).expand(B, 1, 1, N) < torch.tensor([40, 53])[:, None, None, None]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3), "scale": 0.5},
    "softcap": {"softcap": 2.0, "causal": True},
    "bias": {"bias": BIAS},
    "bias of rows": {"bias": BIAS[0, 0, :, :1]},
    "padding": {"bias": PADDING, "softcap": 3.0},
    "sinks": {"sinks": torch.randn(H)},
    "score_mod": {"score_mod": slopes},
    "mask_mod": {"mask_mod": documents},
    "all": {
        "score_mod": slopes,
        "mask_mod": documents,
        "bias": BIAS,
        "softcap": 4.0,
        "sinks": torch.zeros(H),
    },
    "block_mask": {"block_mask": mr.block_mask(documents, None, None, M, N, block_size=16)},
}


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("key_heads", (H, 2))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention(options: dict[str, Any], key_heads: int, dtype: torch.dtype) -> None:
    """Values and gradients, beside torch with the weights written out."""
    given = inputs(dtype, key_heads)
    options = {
        k: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for k, t in options.items()
    }
    options |= {"dropout_p": 0.3, "seed": SEED, "return_lse": True}
    upstream = torch.randn(B, H, M, D).to(dtype)

    def differentiated(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        wide = {
            k: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for k, t in options.items()
        }
        out, lse = function(*leaves, **wide)
        of_lse = lse.masked_fill(lse == -math.inf, 0.0)
        loss = (out * upstream.to(dtype)).sum() + of_lse.sin().sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    ours, base = differentiated(mr.attention, dtype), differentiated(dropped, dtype)
    exact = differentiated(dropped, torch.float64)
    failures = []
    for name, y, ref, b in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, base, strict=True):
        failures += accuracy_failures(name, y, ref, b, dtype, B * H * M)
    assert not failures, "\n".join(failures)


def test_few_keys() -> None:
    """Backward takes delta from the keys there."""
    given = [t.requires_grad_() for t in inputs(torch.float32, rows=5, columns=9)]
    options = {"dropout_p": 0.4, "seed": 5}
    upstream = torch.randn(B, H, 5, D)
    found = torch.autograd.grad(mr.attention(*given, **options), given, upstream)
    for ours, theirs in zip(
        found, torch.autograd.grad(dropped(*given, **options), given, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradient_of_a_captured_tensor() -> None:
    slope = torch.rand(H, dtype=torch.float64, requires_grad=True)
    given = inputs(torch.float64)
    upstream = torch.randn(B, H, M, D, dtype=torch.float64)
    options = {"score_mod": lambda s, b, h, i, j: s - slope[h] * abs(i - j), "dropout_p": 0.3, "seed": 2}
    (found,) = torch.autograd.grad(mr.attention(*given, **options), slope, upstream)
    (expected,) = torch.autograd.grad(dropped(*given, **options), slope, upstream)
    torch.testing.assert_close(found, expected)


def test_lse_is_that_of_no_dropout() -> None:
    given = inputs(torch.float32)
    _, lse = mr.attention(*given, dropout_p=0.5, seed=0, return_lse=True)
    torch.testing.assert_close(lse, mr.attention(*given, return_lse=True)[1])


@pytest.mark.isa
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("p", (0.1, 0.25, 2.0**-16, 1 - 2.0**-10))
def test_each_element(p: float, dtype: torch.dtype) -> None:
    """All dtypes drop the same elements, by themselves: all scores are 0, and values a unit matrix."""
    q, k = torch.zeros(B, H, M, 3, dtype=dtype), torch.zeros(B, H, N, 3, dtype=dtype)
    v = torch.eye(N, dtype=dtype).expand(B, H, N, N)
    expected = factors(p, SEED, B, H, M, N)
    out = mr.attention(q, k, v, dropout_p=p, seed=SEED)
    assert torch.equal(out != 0, expected != 0)
    torch.testing.assert_close(out, (expected / N).to(dtype))


def test_seeds() -> None:
    given = inputs(torch.float32)

    def of(seed: Any) -> Tensor:
        out: Tensor = mr.attention(*given, dropout_p=0.5, seed=seed)
        return out

    assert torch.equal(of(3), of(3))
    assert torch.equal(of(3), of(torch.tensor(3, dtype=torch.int32)))
    assert not torch.equal(of(3), of(4))
    assert not torch.equal(of(None), of(None))
    torch.manual_seed(9)
    first = of(None)
    torch.manual_seed(9)
    assert torch.equal(of(None), first)


def test_no_dropout_has_the_bits_of_none() -> None:
    given = inputs(torch.float32)
    assert torch.equal(mr.attention(*given, dropout_p=0, seed=1), mr.attention(*given))


@pytest.mark.parametrize("dropout_p", (1e-9, 0.1, 0.5, 0.999, 1 - 2**-20))
def test_probabilities(dropout_p: float) -> None:
    """p is rounded to a multiple of 2^-16 below 1, and the mean of the factors is 1."""
    given = inputs(torch.float64)
    options = {"dropout_p": dropout_p, "seed": 8}
    torch.testing.assert_close(mr.attention(*given, **options), dropped(*given, **options))
    factor = factors(dropout_p, 8, 4, 16, 256, 256)
    p = min(round(dropout_p * 2**16), 2**16 - 1) / 2**16
    kept, elements = (factor != 0).double().mean().item(), factor.numel()
    assert abs(kept - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / elements)
    assert abs(factor.mean().item() - 1) <= 4 * math.sqrt(p / (1 - p) / elements)


def test_a_probability_that_rounds_to_0_drops_nothing() -> None:
    given = inputs(torch.float32)
    torch.testing.assert_close(mr.attention(*given, dropout_p=2**-18, seed=1), mr.attention(*given))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "below 0": ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a number from 0 to below 1, got -0.1"),
    "1": ({"dropout_p": 1}, ValueError, "dropout_p: expected a number from 0 to below 1, got 1"),
    "NaN": ({"dropout_p": math.nan}, ValueError, "dropout_p: expected a number from 0 to below 1"),
    "None": ({"dropout_p": None}, TypeError, "dropout_p: expected a number from 0 to below 1"),
    "a real seed": ({"dropout_p": 0.1, "seed": 0.5}, TypeError, "seed: expected an int of 64 bits"),
    "a seed with axes": (
        {"seed": torch.zeros(1, dtype=torch.int64)},
        TypeError,
        "seed: expected an int of 64 bits",
    ),
    "a large seed": ({"dropout_p": 0.1, "seed": 2**63}, ValueError, "seed: expected an int of 64 bits"),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mr.attention(*inputs(torch.float32), **options)


@pytest.mark.parametrize("shape", ((1, H, M, N), (B, 1, M, 1), (N,)), ids=str)
def test_a_bias_learns(shape: tuple[int, ...]) -> None:
    given, bias = inputs(torch.float64), torch.randn(shape, dtype=torch.float64)
    options = {"dropout_p": 0.3, "seed": SEED, "score_mod": slopes, "mask_mod": documents, "softcap": 3.0}
    upstream = torch.randn(B, H, M, D, dtype=torch.float64)
    results = []
    for function in (mr.attention, dropped):
        leaves = [t.detach().clone().requires_grad_() for t in (*given, bias)]
        out = function(*leaves[:3], bias=leaves[3], **options)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_checkpoint() -> None:
    """The backward pass runs attention again, with the seed that forward drew."""
    given = [t.requires_grad_() for t in inputs(torch.float32)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attention(q, k, v, dropout_p=0.5).square().sum()

    torch.manual_seed(3)
    found = torch.autograd.grad(checkpoint(loss, *given, use_reentrant=False), given)
    torch.manual_seed(3)
    for ours, theirs in zip(found, torch.autograd.grad(loss(*given), given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled() -> None:
    torch.compiler.reset()
    counts = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, seed: mr.attention(q, k, v, causal=True, dropout_p=0.2, seed=seed),
        backend=counts,
        fullgraph=True,
    )
    given = inputs(torch.float32)
    for value in range(3):
        seed = torch.tensor(value)
        expected = mr.attention(*given, causal=True, dropout_p=0.2, seed=seed)
        torch.testing.assert_close(compiled(*given, seed), expected)
    assert counts.frame_count == 1


def test_compiled_without_a_seed() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *given: mr.attention(*given, dropout_p=0.2), backend="eager", fullgraph=True
    )
    given = inputs(torch.float32)
    first, second = compiled(*given), compiled(*given)
    assert not torch.equal(first, second)


def test_compiled_with_a_probability_that_changes() -> None:
    torch.compiler.reset()
    counts = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, p: mr.attention(q, k, v, dropout_p=p, seed=1), backend=counts, fullgraph=True
    )
    given = inputs(torch.float32)
    for p in (0.1, 0.2, 0.3, 0.4):
        torch.testing.assert_close(compiled(*given, p), mr.attention(*given, dropout_p=p, seed=1))
    assert counts.frame_count <= 2


def test_members_of_a_batch_drop_the_same_elements() -> None:
    q, k, v = (t[None].expand(3, *t.shape) for t in inputs(torch.float32))
    found = torch.vmap(lambda q, k, v: mr.attention(q, k, v, dropout_p=0.5, seed=1))(q, k, v)
    torch.testing.assert_close(found, mr.attention(q[0], k[0], v[0], dropout_p=0.5, seed=1).expand_as(found))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("with_mod", (False, True), ids=("plain", "score_mod"))
def test_packed_sequences(with_mod: bool, dtype: torch.dtype) -> None:
    """A token's numbers are those of `attention` of all tokens."""
    torch.manual_seed(0)
    shapes = ((60, H, F), (60, 2, F), (60, 2, D))
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    starts = torch.tensor([0, 20, 20, 57])  # the last three tokens belong to no sequence
    options = {"dropout_p": 0.3, "seed": 6, "causal": True}
    mods = {"score_mod": lambda s, b, h, i, j: s - (i - j) * 0.125 * (b + h)} if with_mod else {}
    upstream = torch.randn(60, H, D).to(dtype)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attention_varlen(q, k, v, starts, **options, **mods)

    def stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sequence = torch.searchsorted(starts[1:], torch.arange(60), right=True)
        first = starts[sequence]

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            within = (i - first[i]) - (j - first[j])
            return s - within * 0.125 * (sequence[i] + h) if with_mod else s

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (sequence[i] == sequence[j]) & (sequence[i] < 3)

        one = (t.transpose(0, 1)[None] for t in (q, k, v))
        out: Tensor = dropped(*one, **options, score_mod=score_mod, mask_mod=mask_mod)
        return out[0].transpose(0, 1)

    def differentiated(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    ours, base = differentiated(packed, dtype), differentiated(stored, dtype)
    exact = differentiated(stored, torch.float64)
    failures = []
    for name, y, ref, b in zip(("out", "dq", "dk", "dv"), ours, exact, base, strict=True):
        failures += accuracy_failures(name, y, ref, b, dtype, H * 60)
    assert not failures, "\n".join(failures)


def test_explain() -> None:
    reasons = mr.explain("attention", *inputs(torch.float32), dropout_p=0.1, seed=0).reasons
    assert any("dropout" in reason and "program" in reason for reason in reasons)
