"""attention with score_mod, mask_mod and block_mask on the CPU, and attend: against dense torch."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from typing import Any

import mods
import numpy as np
import pytest
import torch
from dropout import dropped
from mods import CASES, Case, dense
from torch import Tensor

import monoidreduce as mr

F64 = torch.float64
CPU = torch.device("cpu")
# B, H, Hkv, M, N, F, D
SHAPES = (
    (2, 4, 2, 37, 53, 16, 24),
    (1, 3, 1, 130, 70, 8, 8),
    (1, 2, 2, 1, 19, 5, 3),
    (2, 2, 1, 300, 300, 8, 8),
)
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (9, None), "scale": 0.3},
    {"causal": True, "window": (40, 3)},
)


def operands(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q and v as heads within rows, k dense: several strides."""
    B, H, Hkv, M, N, F, D = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=F64).to(dtype)

    q, k, v = normal(B, M, H, F).transpose(1, 2), normal(B, Hkv, N, F), normal(B, N, Hkv, 2 * D)[..., ::2]
    return [t.detach().requires_grad_() for t in (q, k, v.transpose(1, 2))]


def upstream(like: Tensor, seed: int) -> Tensor:
    """Of other strides than the result, and of several times unit size; 0 where that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    g = 3.0 * torch.randn(*like.shape[::-1], generator=generator, dtype=F64).to(like.dtype)
    return g.permute(*range(g.dim())[::-1]).masked_fill(~like.isfinite(), 0.0)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    real = [out for out in outputs if out.requires_grad]
    given = [upstream(out, seed) for seed, out in enumerate(real)]
    return list(torch.autograd.grad(real, leaves, given, allow_unused=True, materialize_grads=True))


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        finite = theirs.detach()[theirs.isfinite()].abs()
        size = max(1.0, float(finite.max())) if finite.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * size, check_dtype=False)


def case_of(make: Any, shape: tuple[int, ...], dtype: torch.dtype = F64) -> Case:
    B, H, _, M, N, *_ = shape
    torch.manual_seed(1)
    return make(B, H, M, N, dtype=dtype, device=CPU)


def check(
    case: Case, shape: tuple[int, ...], options: dict[str, Any], blocks: Any = None, lse: bool = True
) -> None:
    leaves = [*operands(shape, F64), *case.captured]
    masks = {"mask_mod": case.mask_mod} if blocks is None else {"block_mask": blocks}
    found = mr.attention(*leaves[:3], score_mod=case.score_mod, return_lse=True, **masks, **options)
    expected = dense(*leaves[:3], case.score_mod, case.mask_mod, **options)
    kept = slice(None) if lse else slice(1)
    assert_near([*found, *gradients(found[kept], leaves)], [*expected, *gradients(expected[kept], leaves)])


@pytest.mark.isa
@pytest.mark.oldest
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64(make: Any, shape: tuple[int, ...]) -> None:
    check(case_of(make, shape), shape, {})


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    "make", (mods.learned, mods.document, mods.relative_position), ids=lambda m: m.__name__
)
def test_bands(make: Any, options: dict[str, Any]) -> None:
    """causal and window are aligned to the last key; the functions see indices as they are."""
    shape = SHAPES[0]
    check(case_of(make, shape), shape, options)
    check(case_of(make, shape), shape, options, lse=False)


@pytest.mark.isa
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_accumulates_in_float32(make: Any, dtype: torch.dtype) -> None:
    """No worse than a few roundings of the result's type, from float64 of the same inputs."""
    shape = SHAPES[0]
    case, wide = case_of(make, shape, torch.float32), case_of(make, shape)
    leaves = [*operands(shape, dtype), *case.captured]
    exact = [*(t.detach().double().requires_grad_() for t in leaves[:3]), *wide.captured]
    found = mr.attention(*leaves[:3], score_mod=case.score_mod, mask_mod=case.mask_mod)
    expected = dense(*exact[:3], wide.score_mod, wide.mask_mod)[0]
    given = upstream(found, 0)
    ours = torch.autograd.grad(found, leaves, given, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, exact, given.double(), allow_unused=True, materialize_grads=True)
    error = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    assert_near([found.double(), *(t.double() for t in ours)], [expected, *theirs], error)
    assert found.dtype == dtype


@pytest.mark.parametrize("block", (16, (8, 32), 128), ids=str)
@pytest.mark.parametrize(
    "make", (mods.document, mods.sliding_window, mods.nothing_kept), ids=lambda m: m.__name__
)
def test_block_mask(make: Any, block: Any) -> None:
    shape = SHAPES[3]
    B, H, _, M, N, *_ = shape
    case = case_of(make, shape)
    blocks = mr.block_mask(case.mask_mod, B, H, M, N, block_size=block)
    rows, columns = blocks.block
    kept = torch.zeros(B, H, M, N, dtype=torch.bool)
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    kept |= case.mask_mod(b, h, torch.arange(M)[:, None], torch.arange(N))
    for y in range(blocks.kinds.shape[2]):
        for x in range(blocks.kinds.shape[3]):
            part = kept[:, :, y * rows : (y + 1) * rows, x * columns : (x + 1) * columns].flatten(2)
            assert torch.equal(blocks.kinds[:, :, y, x], part.any(-1).long() + part.all(-1))
    check(case, shape, {}, blocks)
    check(case, shape, {"causal": True}, blocks)


def test_block_mask_skips() -> None:
    """NaN in keys that no block keeps is not read."""
    shape = (1, 1, 1, 256, 256, 8, 8)
    q, k, v = operands(shape, F64)
    with torch.no_grad():
        k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    blocks = mr.block_mask(lambda b, h, i, j: j < 128, None, None, 256, 256)
    assert blocks.kinds.tolist() == [[[[2, 0], [2, 0]]]]
    out = mr.attention(q, k, v, block_mask=blocks)
    assert_near([out], [dense(q, k[:, :, :128], v[:, :, :128])[0]])


def test_masked_values_that_are_not_finite() -> None:
    """A key or value that a query does not keep has no part in its row, nor in gradients."""
    shape = (1, 2, 1, 40, 60, 8, 8)
    q, k, v = operands(shape, F64)
    with torch.no_grad():
        k[0, 0, 7, 3], v[0, 0, 7], q[0, 1, 5] = math.inf, math.nan, math.nan
    mask = lambda b, h, i, j: (j != 7) & (i != 5)  # noqa: E731
    out = mr.attention(q, k, v, mask_mod=mask)
    found = torch.autograd.grad(out, (q, k, v), upstream(out, 0))
    clean = [torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0).requires_grad_() for t in (q, k, v)]
    expected, _ = dense(*clean, None, mask)
    assert_near([out, *found], [expected, *torch.autograd.grad(expected, clean, upstream(out, 0))])


@pytest.mark.parametrize("make", (mods.document, mods.natten, mods.sliding_window), ids=lambda m: m.__name__)
def test_block_mask_of_torch(make: Any) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    B, H, M, N = 2, 2, 256, 320
    shape = (B, H, 1, M, N, 8, 8)
    case = case_of(make, shape)
    theirs = flex.create_block_mask(case.mask_mod, B, H, M, N, device="cpu", BLOCK_SIZE=64)
    check(case, shape, {}, theirs)
    ours = mr.block_mask(case.mask_mod, B, H, M, N, block_size=64)
    assert torch.equal(theirs.to_dense() != 0, ours.kinds != 0)


def test_blocks_listed_by_hand() -> None:
    """torch's lists say which blocks are kept, also where mask_mod says otherwise."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    theirs = flex.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=32, mask_mod=lambda b, h, i, j: j % 3 != 0
    )
    shape = (1, 1, 1, 64, 64, 8, 8)
    mask = lambda b, h, i, j: ((i >= 32) | (j >= 32)) & (j % 3 != 0)  # noqa: E731
    check(Case(None, mask), shape, {}, theirs)


def test_flex_attention() -> None:
    """The same functions, unchanged."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    shape = (2, 4, 4, 64, 64, 16, 16)
    for make in (mods.alibi, mods.softcap, mods.relative_position, mods.absent):
        case = case_of(make, shape, torch.float32)
        q, k, v = (t.detach() for t in operands(shape, torch.float32))
        with torch.no_grad():
            theirs = flex.flex_attention(q, k, v, score_mod=case.score_mod)
            ours = mr.attention(q, k, v, score_mod=case.score_mod)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    both = flex.or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: j < 5)
    both = flex.and_masks(both, flex.noop_mask)
    assert_near([mr.attention(q, k, v, mask_mod=both)], [dense(q, k, v, None, both)[0]], 1e-5)


@pytest.mark.parametrize("normalized", (False, True))
def test_attend(normalized: bool) -> None:
    shape = SHAPES[0]
    bias = torch.tensor(-0.4, dtype=F64, requires_grad=True)
    for weight in (lambda s: torch.sigmoid(s + bias), lambda s: torch.relu(s + bias) ** 2 + 0 * bias):
        leaves = [*operands(shape, F64), bias]
        options: dict[str, Any] = dict(causal=True, window=(30, None), weight=weight, normalized=normalized)
        mask = lambda b, h, i, j: (i + j) % 4 != 0  # noqa: E731
        found = mr.attend(*leaves[:3], mask_mod=mask, **options)
        expected = dense(*leaves[:3], None, mask, **options)[0]
        assert_near([found, *gradients((found,), leaves)], [expected, *gradients((expected,), leaves)])


OF_ANY_SIZE: dict[str, Any] = {
    "many": lambda s: torch.sigmoid(s),  # whose sum is more than float16 has
    "large": lambda s: s**4,
    "tiny": lambda s: torch.sigmoid(s - 20.0),
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_normalized_weights_of_any_size(name: str, dtype: torch.dtype) -> None:
    """Weights and their sums are no numbers of the inputs' dtype: outputs are as rounded ones of float64."""
    torch.manual_seed(0)
    keys, spread = (140_000, 1.0) if name == "many" else (64, 3.0)
    q = (spread * torch.randn(1, 1, 3, 64, dtype=F64)).to(dtype)
    k, v = ((size * torch.randn(1, 1, keys, 64, dtype=F64)).to(dtype) for size in (spread, 1.0))
    k, v = (k[..., :8], v[..., :4]) if name == "many" else (k, v)
    q = q[..., :8] if name == "many" else q
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    weight = OF_ANY_SIZE[name]
    found = mr.attend(*leaves, weight=weight, normalized=True)
    weights = weight(wide[0] @ wide[1].mT * q.shape[-1] ** -0.5)
    expected = weights / weights.sum(-1, keepdim=True) @ wide[2]
    given = upstream(found, 0)
    ours, theirs = (
        torch.autograd.grad(found, leaves, given),
        torch.autograd.grad(expected, wide, given.double()),
    )
    for x, y in zip((found, *ours), (expected, *theirs), strict=True):
        assert x.dtype == dtype
        error = (x.double() - y).abs().max() / y.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps, (name, float(error))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (20, 5)}), ids=str)
def test_a_number_of_the_row_has_no_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Softmax ignores what is added to all scores of a row: that gradient is 0 up to sums in float32."""
    shape = (1, 2, 1, 200, 150, 64, 64)
    leaves = operands(shape, dtype)
    of_row, of_both = (torch.randn(n, 200, requires_grad=True) for n in (2, 2))
    of_key = torch.randn(150, requires_grad=True)
    out = mr.attention(
        *leaves, score_mod=lambda s, b, h, i, j: s + of_row[h, i] + of_both[h, i] * of_key[j], **options
    )
    given = upstream(out, 0)
    found = torch.autograd.grad(out, (of_row, of_both, of_key), given)
    assert found[0].abs().max() < 2e-5
    wide = [t.detach().double() for t in leaves]
    captured = [t.detach().double().requires_grad_() for t in (of_row, of_both, of_key)]
    a, b, c = captured
    expected = dense(*wide, lambda s, _, h, i, j: s + a[h, i] + b[h, i] * c[j], None, **options)[0]
    exact = torch.autograd.grad(expected, captured, given.double())
    for ours, theirs in zip(found[1:], exact[1:], strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * max(1.0, float(theirs.abs().max()))


def test_empty() -> None:
    score_mod = lambda s, b, h, i, j: s + i - j  # noqa: E731
    for shape in ((0, 2, 1, 3, 4, 8, 8), (1, 2, 1, 0, 4, 8, 8), (1, 2, 1, 3, 0, 8, 8), (1, 0, 0, 3, 4, 8, 8)):
        leaves = operands(shape, F64)
        out, lse = mr.attention(*leaves, score_mod=score_mod, return_lse=True)
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -math.inf))
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("sizes", ((0, 4, 5), (1, 0, 5), (1, 4, 0)), ids=("batches", "queries", "keys"))
def test_captured_tensors_are_empty_where_there_are_no_scores(sizes: tuple[int, int, int]) -> None:
    batch, rows, columns = sizes
    q, k, v = (torch.ones(batch, 2, n, 8, requires_grad=True) for n in (rows, columns, columns))
    bias = torch.ones(batch, 2, rows, columns, requires_grad=True)
    kept = torch.ones(batch, rows, columns, dtype=torch.bool)
    gates = torch.ones(batch, rows, requires_grad=True)
    leaves = (q, k, v, bias, gates)
    out, lse = mr.attention(
        q,
        k,
        v,
        bias=bias,
        score_mod=lambda score, b, h, i, j: score * gates[b, i],
        mask_mod=lambda b, h, i, j: kept[b, i, j],
        return_lse=True,
    )
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_numbers_change() -> None:
    """A number that a function reads is one of now; a tensor's content too."""
    q, k, v = operands(SHAPES[0], F64)
    cap, shift = 3.0, torch.zeros((), dtype=F64)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(score / cap) + shift * j

    for _ in range(2):
        assert_near([mr.attention(q, k, v, score_mod=score_mod)], [dense(q, k, v, score_mod)[0]])
        cap, shift = 5.0, shift + 0.1


def test_defaults_change() -> None:
    q, k, v = operands(SHAPES[2], F64)

    def scaled(score: Any, b: Any, h: Any, i: Any, j: Any, *, first: float = 2.0, second: float = 3.0) -> Any:
        return score * first

    def run() -> Tensor:
        return mr.attention(q, k, v, score_mod=scaled)  # type: ignore[no-any-return]

    before = run()
    scaled.__kwdefaults__ = {"second": 2.0, "first": 3.0}
    assert not torch.equal(run(), before)
    scaled.__defaults__ = (0,) * 5  # more values than before
    scaled.__kwdefaults__ = {"first": 2.0, "second": 3.0}
    assert torch.equal(run(), before)


@pytest.mark.parametrize("name", ("score_mod", "mask_mod"))
def test_functions_are_let_go(name: str) -> None:
    """With what they captured: users make them anew in each step."""
    q, k, v = operands(SHAPES[2], F64)
    table = torch.ones(40)
    functions = {
        "score_mod": lambda score, b, h, i, j: score + table[j],
        "mask_mod": lambda b, h, i, j: table[j] > 0,
    }
    function = functions.pop(name)
    there = weakref.ref(function)
    mr.attention(q, k, v, **{name: function})
    del function, functions
    gc.collect()
    assert there() is None


def test_partial_functions() -> None:
    def windowed(size: int, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < size

    q, k, v = operands(SHAPES[0], F64)
    mask = functools.partial(windowed, 7)
    assert_near([mr.attention(q, k, v, mask_mod=mask)], [dense(q, k, v, None, mask)[0]])


@pytest.mark.parametrize("dtype", (F64, torch.float32), ids=str)
def test_softcap_and_bias_beside_functions(dtype: torch.dtype) -> None:
    """In the order softcap, score_mod, bias, masks."""
    q, k, v = operands(SHAPES[0], dtype)
    shape = (1, q.shape[1], q.shape[2], k.shape[2])
    score_mod = lambda s, b, h, i, j: s * s - (i - j) * 0.125  # noqa: E731
    mask_mod = lambda b, h, i, j: (i + j) % 3 != 1  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(shape, generator=generator, dtype=dtype)
    for bias in (real, real[0, 0, :, :1], real > 0):
        options = {"score_mod": score_mod, "mask_mod": mask_mod, "softcap": 1.5, "bias": bias}
        ours, theirs = mr.attention(q, k, v, **options), dropped(q, k, v, dropout_p=0.0, seed=0, **options)
        by = torch.randn(ours.shape, generator=generator, dtype=dtype)
        gradients = (torch.autograd.grad(out, (q, k, v), by) for out in (ours, theirs))
        for mine, other in zip((ours, *next(gradients)), (theirs, *next(gradients)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4 if dtype != F64 else 1e-9, atol=1e-5)


def test_an_empty_captured_tensor_is_refused_where_there_are_scores() -> None:
    q, nothing = torch.ones(1, 2, 4, 8), torch.ones(0)
    with pytest.raises(ValueError, match=r"nothing, of shape \[0\]: expected a tensor with elements"):
        mr.attention(q, q, q, score_mod=lambda score, b, h, i, j: score + nothing[h])


def test_refused() -> None:
    q, k, v = operands(SHAPES[0], F64)
    identity = lambda s, b, h, i, j: s  # noqa: E731
    keep = lambda b, h, i, j: i >= j  # noqa: E731
    table = torch.randn(100, dtype=F64, requires_grad=True)
    blocks = mr.block_mask(keep, None, None, 5, 5)
    calls: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"score_mod": identity, "softcap": -1.0}, ValueError, "softcap: expected"),
        ({"mask_mod": keep, "bias": torch.zeros(2, dtype=F64)}, ValueError, "bias: expected a shape"),
        ({"score_mod": 3}, TypeError, "score_mod: expected a function"),
        ({"mask_mod": lambda b, h, i, j: i + j}, mr.TraceError, "expected a condition"),
        ({"score_mod": lambda s, b, h, i, j: s > 0}, mr.TraceError, "expected a number"),
        ({"score_mod": lambda s, b, h, i, j: s if i > j else 0}, mr.TraceError, "torch.where"),
        ({"score_mod": lambda s, b, h, i, j: s + table}, mr.TraceError, "index it"),
        ({"block_mask": blocks, "mask_mod": keep}, ValueError, "mask_mod: expected None beside block_mask"),
        ({"block_mask": blocks}, ValueError, "block_mask: expected one of 37 queries and 53 keys"),
        ({"block_mask": keep}, TypeError, "block_mask: expected the result of"),
    )
    for options, error, text in calls:
        with pytest.raises(error, match=text):
            mr.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="weight: expected a function"):
        mr.attend(q, k, v, weight=2.0)  # type: ignore[arg-type]


def test_any_index_reads_what_is_there() -> None:
    """An index beyond a captured tensor is its nearest one; a negative one counts from its end."""
    q, k, v = operands((1, 1, 1, 6, 6, 8, 8), F64)
    bias = torch.randn(4, dtype=F64)
    found = mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j])
    assert_near([found], [dense(q, k, v, lambda s, b, h, i, j: s + bias[j.clamp(max=3)])[0]])
    found = mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[-1 - j])
    assert_near([found], [dense(q, k, v, lambda s, b, h, i, j: s + bias[(3 - j).clamp(min=0)])[0]])


@pytest.mark.parametrize("make", (mods.learned, mods.document), ids=lambda m: m.__name__)
def test_opcheck(make: Any) -> None:
    shape = SHAPES[0]
    case = case_of(make, shape)
    calls: list[tuple[Any, ...]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "monoidreduce":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    blocks = case.mask_mod and mr.block_mask(case.mask_mod, 2, 4, 37, 53)
    with Recorder():
        leaves = operands(shape, F64)
        mr.attention(*leaves, score_mod=case.score_mod, block_mask=blocks).sum().backward()
    for function, args in calls:
        if not function._schema.name.endswith("backward"):
            leaves = [
                t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
                for t in args
            ]
            torch.library.opcheck(function, tuple(leaves))
    assert len(calls) == 2


@pytest.mark.parametrize("make", (mods.alibi, mods.learned, mods.document), ids=lambda m: m.__name__)
def test_compile_fullgraph(make: Any) -> None:
    shape = SHAPES[0]
    case = case_of(make, shape)
    blocks = case.mask_mod and mr.block_mask(case.mask_mod, 2, 4, 37, 53, block_size=16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attention(q, k, v, score_mod=case.score_mod, block_mask=blocks) * 2

    leaves = operands(shape, F64)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    every = [*leaves, *case.captured]
    found, expected = compiled(*leaves), call(*leaves)
    assert_near([found, *gradients((found,), every)], [expected, *gradients((expected,), every)])


def test_meta_and_export() -> None:
    slopes = torch.rand(4)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (j - i)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mr.attention(q, k, v, score_mod=score_mod, causal=True)

    leaves = [t.detach() for t in operands((2, 4, 2, 37, 53, 16, 24), torch.float32)]
    exported = torch.export.export(Layer(), tuple(leaves)).module()
    assert_near([exported(*leaves)], [Layer()(*leaves)], 1e-6)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    assert mr.attention(*(t.to("meta") for t in leaves), mask_mod=mask).shape == (2, 4, 37, 24)


def test_compile_of_a_mask_of_torch() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    document = torch.arange(64) // 20
    mask = lambda b, h, i, j: document[i] == document[j]  # noqa: E731
    blocks = flex.create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    weight = lambda score: torch.sigmoid(score)  # noqa: E731

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = mr.attend(q, k, v, weight=weight, normalized=True)
        return attended + mr.attention(q, k, v, block_mask=blocks)

    leaves = operands((1, 2, 1, 64, 64, 8, 8), F64)
    assert_near([torch.compile(call, fullgraph=True, backend="eager")(*leaves)], [call(*leaves)])


def test_explain_gradients_of_captured_tensors() -> None:
    table = torch.randn(2, 40, requires_grad=True)
    q = torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
    call: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + 16]}
    on_gpu, on_cpu = (
        mr.explain("attention", q, q, q, **call, hardware="h100"),
        mr.explain("attention", q, q, q, **call),
    )
    assert "the backward kernels add up the gradients of captured tensors" in str(on_gpu)
    assert "torch computes those of an index with query and key" in str(on_cpu)
    wide = [t.float() for t in (q, q, q)]
    torch.use_deterministic_algorithms(True)
    try:
        in_order = mr.explain("attention", q, q, q, **call, hardware="h100")
        on_simt = mr.explain("attention", *wide, **call, hardware="h100")
    finally:
        torch.use_deterministic_algorithms(False)
    assert in_order.deterministic and on_simt.deterministic
    assert "whose index has the key, as integers" in str(in_order)
    assert "torch computes those of an index with query and key" in str(on_simt)
    call = {"score_mod": lambda s, b, h, i, j: s + table.detach()[h, i - j + 16]}
    assert "captured" not in str(mr.explain("attention", q, q, q, **call, hardware="h100"))


def test_explain() -> None:
    leaves = operands((1, 2, 1, 64, 64, 8, 8), torch.float32)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    before = mr._C.path_counts()
    mr.attention(*leaves, mask_mod=mask).sum().backward()
    after = mr._C.path_counts()
    explained = mr.explain(
        "attention", *leaves, block_mask=mr.block_mask(mask, None, None, 64, 64, block_size=16)
    )
    assert {explained.forward, explained.backward} == {n for n in after if after[n] > before.get(n, 0)}
    assert "of 16 blocks 6 are skipped" in explained.reasons
    assert any("which the CPU engine interprets" in reason for reason in explained.reasons)
    halves = [t.to(torch.bfloat16) for t in leaves]
    planned = mr.explain("attention", *halves, mask_mod=mask, hardware="h100")
    assert planned.forward == "modified_attention_forward/cuda/sm90/bfloat16"
    assert planned.backward == "modified_attention_backward/cuda/sm90/bfloat16"


def test_explain_planes() -> None:
    """In the mode "emulated" Hopper's tensor cores take float32 up to 128 wide."""
    q, table = torch.empty(2, 40, 300, 64, device="meta"), torch.rand(40, requires_grad=True)
    call: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + table.to("meta")[h] * (j - i)}
    with mr.float32("emulated"):
        planned = mr.explain("attention", q, q, q, **call, hardware="h200")
        wide = mr.explain("attention", *(q.repeat(1, 1, 1, 4),) * 3, **call, hardware="h200")
        few = mr.explain("attention", q[:, :2], q[:, :2], q[:, :2], **call, hardware="h200")
        weights = mr.explain("attend", q, q, q, weight=torch.relu, hardware="h200")
        ampere = mr.explain("attention", q, q, q, **call, hardware="a100")
    for taken in (planned, weights):
        assert taken.forward == "modified_attention_forward/cuda/planes/float32"
        assert taken.backward == "modified_attention_backward/cuda/planes/float32"
    for other in (wide, few, ampere):
        assert other.forward == "modified_attention_forward/cuda/simt/float32"
    assert "a width is 256, more than 128" in str(wide) and "there are few rows" in str(few)
    unwanted = mr.explain("attention", q, q, q, **call, hardware="h200")
    assert "mr.float32 does not say emulated" in str(unwanted)


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    (
        (torch.float32, 64, "the inputs are float32, not multiplied in tf32"),
        (torch.float64, 64, "the inputs are float64"),
        (torch.bfloat16, 264, "a width is 264, more than 256"),
        (torch.float16, 0, "a width is 0"),
    ),
)
@pytest.mark.parametrize("hardware", ("h100", "a100"))
def test_explain_without_tensor_cores(hardware: str, dtype: torch.dtype, width: int, reason: str) -> None:
    """What tensor cores do not take has SIMT kernels, on any GPU."""
    leaves = [torch.empty(1, 2, 64, width, dtype=dtype, device="meta") for _ in range(3)]
    for op, options in (
        (mr.attention, {"mask_mod": lambda b, h, i, j: i >= j}),
        (mr.attend, {"weight": torch.relu}),
    ):
        planned = mr.explain(op, *leaves, **options, hardware=hardware)
        name = str(dtype).removeprefix("torch.")
        assert planned.forward == f"modified_attention_forward/cuda/simt/{name}"
        assert planned.backward == f"modified_attention_backward/cuda/simt/{name}"
        for way in ("forward", "backward"):
            (text,) = (text for text in planned.reasons if text.startswith(f"{way}: not sm90"))
            assert text.endswith(reason)


def test_explain_skipped_tiles() -> None:
    q = torch.empty(1, 2, 256, 64, dtype=torch.float32, device="meta")
    blocks = mr.block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    planned = mr.explain("attention", q, q, q, block_mask=blocks, hardware="h100")
    tile = "in tiles of 64 queries and 64 keys that meet no other block"
    assert f"of 4 blocks 1 are skipped, {tile}" in planned.reasons


SM80, WIDE = "tensor cores, through mma.sync; not sm90: ", "a width is more than 128"
SM90 = "tensor cores, through sm_90a"


@pytest.mark.parametrize(
    ("hardware", "width", "blocked", "deterministic", "forward", "backward"),
    (
        ("h100", 64, False, False, SM90, SM90),
        ("h100", 128, True, False, SM90, SM90),
        ("h100", 128, False, True, SM90, SM90),
        (
            "h100",
            128,
            True,
            True,
            SM90,
            SM80 + "blocks are skipped, and the deterministic mode is asked for",
        ),
        ("h100", 136, False, False, *2 * (SM80 + "functions modify scores, and " + WIDE,)),
        ("a100", 64, True, False, *2 * (SM80 + "the GPU is sm_80, not sm_90",)),
    ),
)
def test_planned_kernels(
    hardware: str, width: int, blocked: bool, deterministic: bool, forward: str, backward: str
) -> None:
    """What a GPU that is not there would run, and why not Hopper's kernels."""
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    leaves = operands((1, 2, 1, 64, 64, width, 8), torch.bfloat16)
    given: dict[str, Any] = {"mask_mod": mask}
    if blocked:
        given = {"block_mask": mr.block_mask(mask, None, None, 64, 64, block_size=16)}
    torch.use_deterministic_algorithms(deterministic)
    try:
        planned = mr.explain("attention", *leaves, **given, hardware=hardware)
    finally:
        torch.use_deterministic_algorithms(False)
    of_forward, of_backward = ("sm90" if reason == SM90 else "sm80" for reason in (forward, backward))
    of_backward += "/deterministic" * deterministic
    assert planned.forward == f"modified_attention_forward/cuda/{of_forward}/bfloat16"
    assert planned.backward == f"modified_attention_backward/cuda/{of_backward}/bfloat16"
    assert f"forward: {forward}" in "\n".join(planned.reasons)
    assert f"backward: {backward}" in "\n".join(planned.reasons)


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    leaves = operands((1, 2, 1, 40, 50, 16, 24), torch.float32)
    counts = []
    for options in ({}, {"mask_mod": lambda b, h, i, j: i >= j}):
        with FlopCounterMode(display=False) as counter:
            mr.attention(*leaves, **options).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("nan_at", ("q", "k", "v"))
def test_nan_stays_in_its_rows(nan_at: str) -> None:
    shape = (1, 2, 1, 40, 60, 8, 8)
    q, k, v = operands(shape, F64)
    with torch.no_grad():
        {"q": q[0, 0, 3], "k": k[0, 0, 3], "v": v[0, 0, 3]}[nan_at].fill_(math.nan)
    score_mod = lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)  # noqa: E731
    mask = lambda b, h, i, j: (j != 3) | (i < 5)  # noqa: E731
    found = mr.attention(q, k, v, score_mod=score_mod, mask_mod=mask)
    touched = torch.zeros(1, 2, 40, dtype=torch.bool)
    if nan_at == "q":
        touched[0, 0, 3] = True
    else:
        touched[:, :, :5] = True
    assert torch.equal(found.isnan().any(-1), touched)


def test_transforms_and_modules() -> None:
    q, k, v = (t.detach() for t in operands((2, 2, 1, 20, 20, 8, 8), torch.float32))
    slopes = torch.rand(2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attention(q[None], k[None], v[None], score_mod=alibi)[0]

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (j - i)

    expected = mr.attention(q, k, v, score_mod=alibi)
    assert torch.equal(torch.vmap(call)(q, k, v), expected)
    module = mr.nn.Attention(score_mod=alibi, causal=True)
    assert torch.equal(module(q, k, v), mr.attention(q, k, v, score_mod=alibi, causal=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(q, k, v).dtype == torch.bfloat16


def test_explain_attend() -> None:
    leaves = operands((1, 2, 1, 64, 64, 8, 8), torch.float32)
    before = mr._C.path_counts()
    mr.attend(*leaves, weight=torch.sigmoid).sum().backward()
    after = mr._C.path_counts()
    explained = mr.explain("attend", *leaves, weight=torch.sigmoid)
    assert {explained.forward, explained.backward} == {n for n in after if after[n] > before.get(n, 0)}
    assert any("weight and mask_mod are a program" in reason for reason in explained.reasons)
    wide = [torch.empty(1, 2, 64, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    for normalized, tier in ((False, "sm90"), (True, "sm80")):  # a column of ones beside the values
        planned = mr.explain(mr.attend, *wide, weight=torch.sigmoid, normalized=normalized, hardware="h100")
        assert planned.forward == f"modified_attention_forward/cuda/{tier}/bfloat16"
        assert planned.backward == f"modified_attention_backward/cuda/{tier}/bfloat16"
        named = "normalized: the sum of the weights is one more column of v, 129 in place of 128"
        assert (named in planned.reasons) == normalized
    planned = mr.explain("attend", *leaves, weight=torch.sigmoid, hardware="h100")
    assert planned.forward == "modified_attention_forward/cuda/simt/float32"


NUMPY_MODS: dict[str, tuple[Any, Any]] = {
    "mask, on the left": (lambda b, h, i, j: np.int64(3) >= i - j, lambda b, h, i, j: i - j <= 3),
    "mask, arithmetic": (
        lambda b, h, i, j: (np.int32(3) * i) % np.uint8(4) <= j,
        lambda b, h, i, j: (3 * i) % 4 <= j,
    ),
    "score, on the left": (lambda s, b, h, i, j: np.float32(0.5) * s, lambda s, b, h, i, j: 0.5 * s),
    "score, as a branch": (
        lambda s, b, h, i, j: torch.where(i >= np.int64(2), s, np.float16(0.5)),
        lambda s, b, h, i, j: torch.where(i >= 2, s, 0.5),
    ),
    "score, as a base": (lambda s, b, h, i, j: np.float64(2) ** s, lambda s, b, h, i, j: 2.0**s),
}


@pytest.mark.parametrize("name", NUMPY_MODS)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    q = torch.randn(1, 2, 7, 8)
    of_numpy, of_python = NUMPY_MODS[name]
    argument = f"{name.partition(',')[0]}_mod"
    found = mr.attention(q, q, q, **{argument: of_numpy})
    assert torch.equal(found, mr.attention(q, q, q, **{argument: of_python}))
    assert not torch.equal(found, mr.attention(q, q, q))
