"""attention_varlen with score_mod and mask_mod: against dense torch, and attention, of each sequence."""

from __future__ import annotations

import math
from typing import Any

import mods
import pytest
import torch
from modified_calls import Results, assert_rule, dense_per_sequence, drawn, per_sequence, results
from mods import CASES, Case
from specimens import starts, varlen_inputs
from torch import Tensor

import monoidreduce as mr

F64 = torch.float64
CPU = torch.device("cpu")
# Of queries and of keys; None: the same.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "many": ((3, 70, 1, 1, 64, 2, 131), None),
    "unequal": ((5, 0, 21, 3, 90), (9, 4, 17, 0, 200)),
    "fewer_keys": ((33, 80), (12, 5)),
    "empty": ((0, 0, 6, 0), (0, 3, 6, 0)),
    "none": ((), ()),
}
BANDS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (9, None), "scale": 0.3},
    {"causal": True, "window": (40, 3)},
)
SOME = (mods.learned, mods.document, mods.relative_position)


class Packed:
    """Operands of packed sequences, of 4 heads that share 2 of keys."""

    def __init__(self, lengths: str, dtype: torch.dtype = F64) -> None:
        of_queries, of_keys = LENGTHS[lengths]
        q, k, v, *self.starts = varlen_inputs(of_queries, of_keys, dtype=dtype, device=CPU).values()
        self.leaves = [t.requires_grad_() for t in (q, k, v)]
        self.lengths = (of_queries, of_queries if of_keys is None else of_keys)
        self.size = (len(of_queries) or 1, 4, *(max(each, default=0) or 1 for each in self.lengths))

    def case(self, make: Any, dtype: torch.dtype = F64, seed: int = 1) -> Case:
        torch.manual_seed(seed)
        return make(*self.size, dtype=dtype, device=CPU)

    def ours(self, case: Case, **options: Any) -> Any:
        given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "return_lse": True, **options}
        return lambda q, k, v: mr.attention_varlen(q, k, v, *self.starts, **given)

    def of_torch(self, case: Case, **options: Any) -> Any:
        return lambda q, k, v: dense_per_sequence(q, k, v, self.lengths, case, **options)


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        finite = theirs.detach()[theirs.isfinite()].abs()
        size = max(1.0, float(finite.max())) if finite.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_float64(lengths: str, make: Any) -> None:
    """Values and gradients, including the gradients of captured tensors."""
    packed = Packed(lengths)
    case = packed.case(make)
    leaves = [*packed.leaves, *case.captured]
    assert_near(results(packed.ours(case), leaves), results(packed.of_torch(case), leaves))


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("make", SOME, ids=lambda make: make.__name__)
def test_bands(make: Any, options: dict[str, Any]) -> None:
    """causal and window are aligned to a sequence's last key; the functions see indices as they are."""
    packed = Packed("unequal")
    case = packed.case(make)
    leaves = [*packed.leaves, *case.captured]
    ours, theirs = packed.ours(case, **options), packed.of_torch(case, **options)
    assert_near(results(ours, leaves), results(theirs, leaves))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_accumulates_in_float32(make: Any, dtype: torch.dtype) -> None:
    packed = Packed("many", dtype)

    def draw(seed: int) -> Results:
        def case_in(of: torch.dtype) -> Case:
            return packed.case(make, of, 100 + seed)

        return drawn(packed.leaves, case_in, packed.ours, packed.of_torch)

    assert_rule(draw, dtype, 131)


@pytest.mark.parametrize("make", SOME, ids=lambda make: make.__name__)
@pytest.mark.parametrize("compensated", (False, True), ids=("plain", "compensated"))
def test_sinks(compensated: bool, make: Any) -> None:
    """As of `attention` of each sequence. A query of none has its sink alone."""
    packed = Packed("unequal")
    case = packed.case(make)
    sinks = torch.randn(4, dtype=F64, requires_grad=True)
    leaves = [*packed.leaves, sinks, *case.captured]
    options: dict[str, Any] = {"sinks": sinks, "causal": True, "compensated": compensated}

    def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> Any:
        mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
        return mr.attention(q, k, v, return_lse=True, **mods, **options)

    def each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return per_sequence(attend, q, k, v, packed.lengths, case)

    found = results(packed.ours(case, **options), leaves)
    assert_near(found, results(each, leaves))
    assert torch.equal(found[1][:, -2:], sinks.detach()[:, None].expand(4, 2))


def test_keys_are_of_the_same_sequence_as_queries() -> None:
    """A tensor that is indexed by the sequence and the key is learned, also through another tensor."""
    packed = Packed("unequal")
    table = torch.randn(5, 200, dtype=F64, requires_grad=True)
    of_key, of_sequence = torch.arange(400) % 200, torch.tensor([4, 2, 0, 1, 3])

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * table[b, i] + table[of_sequence[b], of_key[j + 3 * b]]

    leaves = [*packed.leaves, table]
    case = Case(score_mod, None)
    assert_near(results(packed.ours(case), leaves), results(packed.of_torch(case), leaves))


def test_one_sequence_is_attention() -> None:
    q, k, v, _ = varlen_inputs((77,), behind=0, keys=None, dtype=torch.float32, device=CPU).values()
    score_mod = lambda s, b, h, i, j: s + 0.1 * (j - i) + b  # noqa: E731
    options: dict[str, Any] = {"score_mod": score_mod, "causal": True, "return_lse": True}
    got = mr.attention_varlen(q, k, v, starts([77], CPU, torch.int64), **options)
    out, lse = mr.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), **options)
    torch.testing.assert_close(got, (out[0].transpose(0, 1), lse[0]))


def test_a_function_of_both_operators() -> None:
    """The program of one is not taken for that of the other."""
    packed = Packed("many")
    case = packed.case(mods.document)
    q, k, v = packed.leaves
    before = packed.ours(case)(q, k, v)
    mr.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), mask_mod=case.mask_mod)
    assert_near(list(packed.ours(case)(q, k, v)), list(before), 0.0)


def test_gradients_of_lse_alone() -> None:
    packed = Packed("many")
    case = packed.case(mods.learned)
    leaves = [*packed.leaves[:2], *case.captured]
    ours, theirs = (
        call(*packed.leaves)[1].masked_fill(torch.arange(274) >= 272, 0).sum()
        for call in (packed.ours(case), packed.of_torch(case))
    )
    assert_near(list(torch.autograd.grad(ours, leaves)), list(torch.autograd.grad(theirs, leaves)))


def test_nothing_leaks_between_sequences() -> None:
    """NaN and infinity in one of them, and behind the last, are not seen in the others."""
    packed = Packed("many")
    case = packed.case(mods.alibi)
    clean = packed.ours(case)(*packed.leaves)[0]
    with torch.no_grad():
        for t, value in zip(packed.leaves, (math.nan, math.inf, math.nan), strict=True):
            t[3:73] = t[272:] = value
    out = packed.ours(case)(*packed.leaves)[0]
    gradients = torch.autograd.grad(out.nan_to_num().sum(), packed.leaves)
    others = [*range(3), *range(73, 272)]
    assert torch.equal(out[others], clean[others]) and not out[272:].any()
    for gradient in gradients:
        assert bool(gradient[others].isfinite().all()) and not gradient[272:].any()


@pytest.mark.parametrize("values", ([1, 5, 9], [0, 7, 5], [0, 5, 12], [-1, 0, 3], [0, 2**40, 9]), ids=str)
@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
def test_starts_that_are_not_ascending(name: str, values: list[int]) -> None:
    inputs: dict[str, Any] = varlen_inputs((4, 6), (5, 6), behind=0, dtype=torch.float32, device=CPU)
    inputs[name] = torch.tensor(values)
    with pytest.raises(ValueError, match=rf"{name}: expected ascending numbers from 0 to at most"):
        mr.attention_varlen(**inputs, mask_mod=lambda b, h, i, j: i >= j)


def test_refused() -> None:
    packed = Packed("many")
    q, k, v = packed.leaves
    identity = lambda s, b, h, i, j: s  # noqa: E731
    table = torch.randn(100, dtype=F64, requires_grad=True)
    calls: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"score_mod": identity, "softcap": -2.0}, ValueError, "softcap: expected"),
        ({"dropout_p": 0.5, "ranks": object()}, ValueError, "dropout_p: expected 0 beside ranks"),
        ({"score_mod": 3}, TypeError, "score_mod: expected a function"),
        ({"mask_mod": lambda b, h, i, j: i + j}, mr.TraceError, "expected a condition"),
        (
            {"score_mod": identity, "ranks": object()},
            ValueError,
            "score_mod: expected None beside ranks",
        ),
        ({"block_mask": identity}, TypeError, "block_mask.*write mask_mod"),
        ({"alibi_slopes": table}, TypeError, "alibi_slopes.*write score_mod"),
    )
    for options, error, text in calls:
        with pytest.raises(error, match=text):
            mr.attention_varlen(q, k, v, *packed.starts, **options)


@pytest.mark.parametrize("make", (mods.alibi, mods.learned, mods.document), ids=lambda m: m.__name__)
def test_compile_fullgraph(make: Any) -> None:
    packed = Packed("unequal", torch.float32)
    case = packed.case(make, torch.float32)
    score_mod, mask_mod = case.score_mod, case.mask_mod
    cu_q, cu_k = packed.starts

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attention_varlen(q, k, v, cu_q, cu_k, score_mod=score_mod, mask_mod=mask_mod)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [*packed.leaves, *case.captured]
    found, expected = (
        [out := function(*leaves[:3]), *torch.autograd.grad(out.sum(), leaves, allow_unused=True)]
        for function in (compiled, call)
    )
    assert_near(found, expected, 1e-6)


def test_opcheck() -> None:
    packed = Packed("unequal")
    case = packed.case(mods.learned)
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function._schema.name == "monoidreduce::modified_attention":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    with Recorder():
        packed.ours(case)(*packed.leaves)
    ((function, args),) = calls
    leaves = [
        t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args
    ]
    torch.library.opcheck(function, tuple(leaves))


def test_explain() -> None:
    inputs = varlen_inputs((40, 3), keys=None, dtype=torch.float32, device=CPU)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    before = mr._C.path_counts()
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    mr.attention_varlen(**leaves, mask_mod=mask).sum().backward()
    after = mr._C.path_counts()
    explained = mr.explain("attention_varlen", **inputs, mask_mod=mask)
    assert {explained.forward, explained.backward} == {n for n in after if after[n] > before.get(n, 0)}
    assert any("which the CPU engine interprets" in reason for reason in explained.reasons)
    halves = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in inputs.items()}
    planned = mr.explain("attention_varlen", **halves, mask_mod=mask, hardware="h100")
    assert planned.forward == "modified_attention_forward/cuda/sm90/bfloat16"
    planned = mr.explain("attention_varlen", **inputs, mask_mod=mask, hardware="h100")
    assert planned.forward == "modified_attention_forward/cuda/simt/float32"
