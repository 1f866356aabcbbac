"""score_mod and mask_mod in planes of float16 (`mr.float32("emulated")`), beside dense torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import mods
import pytest
import torch
from modified_calls import (
    Results,
    assert_rule,
    check,
    dense_per_sequence,
    drawn,
    operands,
    results,
)
from mods import CASES, Case, Mod, dense
from paths import counts, takes
from specimens import attention_inputs, varlen_inputs
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm90")

FORWARD, BACKWARD = (f"modified_attention_{way}/cuda/planes/float32" for way in ("forward", "backward"))
IN_ORDER = BACKWARD.replace("planes", "planes/deterministic")
PASSES = {FORWARD, BACKWARD}
# B, H, Hkv, M, N, F, D: so many heads that rows are not few.
SHAPES = (
    (2, 18, 6, 201, 333, 64, 64),
    (2, 18, 18, 201, 333, 128, 128),
    (1, 36, 12, 150, 270, 59, 100),
    (1, 34, 17, 190, 300, 104, 56),
)
DRAWS = 8  # error norms are over so many


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """The reference, torch's float32, must not round to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    with mr.float32("emulated"):
        yield


def check_in_planes(make: Any, shape: tuple[int, ...], gpu: torch.device, **options: Any) -> None:
    """Gradients of captured tensors may take other operators too."""
    before = counts()
    check(make, shape, torch.float32, gpu, **options)
    taken = {path for path in counts() - before if path.startswith("modified_attention")}
    assert taken == PASSES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_functions(make: Any, shape: tuple[int, ...], gpu: torch.device) -> None:
    check_in_planes(make, shape, gpu)


def infinite_behind_the_last_query(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A number for each head, divided by 1 for queries and by 0 beyond the last one."""
    of_heads = torch.randn(H, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda s, b, h, i, j: s + of_heads[h] / (M - i).clamp(0, 1), None, (of_heads,))


def test_rows_beyond_the_last_query_add_nothing_to_tables(gpu: torch.device) -> None:
    """201 queries leave rows of the last tile empty. The function gives these rows infinite scores."""
    check_in_planes(infinite_behind_the_last_query, SHAPES[0], gpu)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_bands(shape: tuple[int, ...], options: dict[str, Any], gpu: torch.device) -> None:
    check_in_planes(mods.learned, shape, gpu, **options)


def far_apart(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """Whole blocks, tiles that keep nothing, and a head that keeps nothing."""
    return Case(None, lambda b, h, i, j: ((i // 128 - j // 128) % 3 == 1) & (h != 1))


@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=("full", "causal"))
@pytest.mark.parametrize("shape", ((2, 12, 6, 900, 1000, 64, 64), (1, 12, 3, 700, 900, 128, 64)), ids=str)
@pytest.mark.parametrize(
    "make",
    (mods.document, mods.sliding_window, mods.nothing_kept, far_apart),
    ids=lambda m: m.__name__,
)
def test_block_mask(make: Any, shape: tuple[int, ...], options: dict[str, Any], gpu: torch.device) -> None:
    """Tiles of queries and of keys are skipped, also of heads that share keys."""
    check_in_planes(make, shape, gpu, blocked=True, **options)


def norms(make: Any, width: int, gpu: torch.device) -> dict[str, tuple[float, float]]:
    """Norms of the errors of the output and the gradients, over several draws: ours, and torch's in float32.

    Of captured tensors only those with 64 elements or more, beside `Recomputed`: errors of few numbers depend
    on luck.
    """
    B, H, M, N = 2, 12, 500, 700

    def made(seed: int, dtype: torch.dtype) -> Case:
        torch.manual_seed(seed)
        return make(B, H, M, N, dtype=dtype, device=gpu)

    def found(call: Any, leaves: list[Tensor], case: Case, **how: Any) -> list[Tensor]:
        given = partial(call, score_mod=case.score_mod, mask_mod=case.mask_mod, **how)
        out, _, *gradients = results(given, [*leaves, *case.captured])
        return [out, *gradients]

    squares: dict[str, Tensor] = {}  # name -> [3]: of our errors, of torch's, of the exact result
    for seed in range(DRAWS):
        leaves = [
            t.requires_grad_()
            for t in attention_inputs(B, H, 4, M, N, width, width, dtype=torch.float32, device=gpu).values()
        ]
        case, wide = made(seed, torch.float32), [t.detach().double().requires_grad_() for t in leaves]
        y = found(mr.attention, leaves, case, return_lse=True)
        torchs = found(dense, leaves, case)
        if case.captured:
            torchs[4:] = found(dense, leaves, case, recomputed=True)[4:]
        exact = found(dense, wide, made(seed, torch.float64))
        names = ["out", "d_q", "d_k", "d_v", *(f"d_captured{n}" for n in range(len(y) - 4))]
        for name, ours, theirs, ref in zip(names, y, torchs, exact, strict=True):
            if ref.numel() >= 64:
                of_draw = torch.stack([(ours - ref).norm(), (theirs - ref).norm(), ref.norm()]) ** 2
                squares[name] = squares.get(name, 0) + of_draw
    return {name: (float(of[0] / of[2]) ** 0.5, float(of[1] / of[2]) ** 0.5) for name, of in squares.items()}


def positive(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A number for scores that are NaN."""
    return Case(lambda s, b, h, i, j: torch.where(s > 0.0, s, 0.0), None)


def tanh_of_scores(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    return Case(lambda score, b, h, i, j: 5.0 * torch.tanh(score / 5.0), None)


def many_functions(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """Whose rounding errors would show, were they approximations.

    All are smooth: where rounding gives a score the other sign, a step of a derivative at 0 would show.
    """

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        part = torch.log1p(torch.exp(score)) + torch.sigmoid(score) * torch.expm1(-score * score)
        return part + 0.5 * torch.log(1.0 + score * score) + 0.3 * torch.sin(score)

    return Case(score_mod, None)


def causal(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    return Case(None, lambda b, h, i, j: i + N - M >= j)


def by_distance(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A learned entry for each distance up to 20, and one for all beyond, which most elements read."""
    table = torch.randn(H, 41, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda s, b, h, i, j: s + table[h, (j - i).clamp(-20, 20) + 20], None, (table,))


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize(
    "make",
    (
        mods.alibi,
        mods.document,
        mods.relative_position,
        mods.learned,
        by_distance,
        tanh_of_scores,
        many_functions,
        causal,
    ),
    ids=lambda m: m.__name__,
)
def test_error_norms(make: Any, width: int, gpu: torch.device) -> None:
    """At most 1.25 times those of torch in float32, for normal numbers.

    Elements add to the entries of relative_position one after another, in float32, and torch adds in pairs:
    2.1 times its error on an H200.
    """
    for name, (ours, theirs) in norms(make, width, gpu).items():
        bound = 2.5 if make is mods.relative_position and name == "d_captured0" else 1.25
        assert ours <= bound * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


@pytest.mark.parametrize("make", (mods.alibi, mods.document, mods.learned), ids=lambda m: m.__name__)
@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=("full", "causal"))
def test_packed_sequences(options: dict[str, Any], width: int, make: Any, gpu: torch.device) -> None:
    lengths = (300, 1, 64, 0, 517, 128, 17)
    size = (len(lengths), 18, max(lengths), max(lengths))

    def draw(seed: int) -> Results:
        torch.manual_seed(seed)
        inputs = varlen_inputs(lengths, None, 18, 6, width, width, dtype=torch.float32, device=gpu)
        q, k, v, *of_sequences = inputs.values()

        def case_in(of: torch.dtype) -> Case:
            torch.manual_seed(100 + seed)
            return make(*size, dtype=of, device=gpu)

        def ours(case: Case) -> Any:
            given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "return_lse": True, **options}
            return lambda *tensors: mr.attention_varlen(*tensors, *of_sequences, **given)

        def of_torch(case: Case, **how: Any) -> Any:
            return lambda *tensors: dense_per_sequence(*tensors, (lengths, lengths), case, **options, **how)

        return drawn([t.requires_grad_() for t in (q, k, v)], case_in, ours, of_torch)

    before = counts()
    assert_rule(draw, torch.float32, max(lengths))
    assert {path for path in counts() - before if path.startswith("modified")} == PASSES


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_sinks(shape: tuple[int, ...], gpu: torch.device) -> None:
    """A sink takes part in the softmax as one more key would whose value is 0."""
    _, H, _, M, N, *_ = shape

    def draw(seed: int) -> Results:
        torch.manual_seed(seed)
        leaves = operands(shape, torch.float32, gpu)

        def case_in(of: torch.dtype) -> Case:
            torch.manual_seed(100 + seed)
            sinks = torch.randn(H, dtype=torch.float64).to(gpu, of).requires_grad_()
            return Case(lambda s, b, h, i, j: s - 0.02 * (i - j).abs(), None, (sinks,))

        def ours(case: Case) -> Any:
            given = {"score_mod": case.score_mod, "sinks": case.captured[0], "return_lse": True}
            return lambda q, k, v: mr.attention(q, k, v, **given)

        def of_torch(case: Case, **how: Any) -> Any:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                out, lse = dense(q, k, v, case.score_mod, **how)
                both = torch.logaddexp(lse, case.captured[0][None, :, None])
                return out * (lse - both).exp()[..., None], both

            return attend

        return drawn(leaves, case_in, ours, of_torch)

    with takes(PASSES):
        assert_rule(draw, torch.float32, max(M, N))


def test_dropout(gpu: torch.device) -> None:
    leaves = operands(SHAPES[1], torch.float32, gpu)
    given: dict[str, Any] = {"dropout_p": 0.3, "seed": 7, "return_lse": True}
    score_mod = lambda s, b, h, i, j: s - 0.01 * (i - j).abs()  # noqa: E731
    with takes(PASSES):
        found = results(lambda *t: mr.attention(*t, score_mod=score_mod, **given), leaves)
    with mr.float32("simt"):
        simt = results(lambda *t: mr.attention(*t, score_mod=score_mod, **given), leaves)
    for y, of_simt in zip(found, simt, strict=True):
        torch.testing.assert_close(y, of_simt, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", (0, 1, 2), ids=("q", "k", "v"))
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_one_gradient_alone(shape: tuple[int, ...], wanted: int, gpu: torch.device) -> None:
    """Has the bits that it has beside the others: each gradient has a kernel of its own."""
    leaves, score_mod = operands(shape, torch.float32, gpu), lambda s, b, h, i, j: s + 0.1 * (j - i)
    out = mr.attention(*leaves, score_mod=score_mod)
    upstream = torch.randn_like(out)
    of_all = torch.autograd.grad(out, leaves, upstream)[wanted]
    given = [t.detach() for t in leaves]
    given[wanted].requires_grad_()
    with takes(PASSES):
        out = mr.attention(*given, score_mod=score_mod)
        (found,) = torch.autograd.grad(out, given[wanted], upstream)
    assert torch.equal(found, of_all)


def test_a_table_alone(gpu: torch.device) -> None:
    """Its gradient is the one beside all others."""
    shape = SHAPES[1]
    leaves = operands(shape, torch.float32, gpu)
    case = mods.relative_position(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu)
    call = partial(mr.attention, score_mod=case.score_mod, mask_mod=case.mask_mod)
    out = call(*leaves)
    upstream = torch.randn_like(out)
    *_, beside = torch.autograd.grad(out, [*leaves, *case.captured], upstream)
    with takes(PASSES):
        (alone,) = torch.autograd.grad(call(*(t.detach() for t in leaves)), case.captured, upstream)
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-5)


def test_strides(gpu: torch.device) -> None:
    leaves = [t.detach() for t in operands((2, 12, 12, 400, 400, 64, 64), torch.float32, gpu)]
    score_mod = lambda s, b, h, i, j: s + 0.1 * (j - i)  # noqa: E731
    expected = mr.attention(*(t.contiguous() for t in leaves), score_mod=score_mod)
    for laid in (leaves, [t.repeat_interleave(2, -1)[..., ::2] for t in leaves]):
        with takes({FORWARD}):
            assert torch.equal(mr.attention(*laid, score_mod=score_mod), expected)


NOT_FINITE = {
    "inf": [torch.inf],
    "-inf": [-torch.inf],
    "nan": [torch.nan],
    "both": [torch.inf, -torch.inf],
    "twice": [torch.inf, torch.inf],
}


@pytest.mark.parametrize("values", NOT_FINITE)
@pytest.mark.parametrize("place", (0, 1, 2), ids=("q", "k", "v"))
@pytest.mark.parametrize(
    "make", (mods.alibi, mods.document, tanh_of_scores, positive), ids=lambda m: m.__name__
)
def test_what_is_not_finite(make: Any, place: int, values: str, gpu: torch.device) -> None:
    """In the places where SIMT kernels have it: a key that is not finite spoils no query that masks it."""
    shape = (2, 17, 17, 130, 200, 128, 128)
    leaves = operands(shape, torch.float32, gpu)
    case = make(2, 17, 130, 200, dtype=torch.float32, device=gpu)
    with torch.no_grad():
        for line in ((1, 2, 100), (0, 1, 60)):
            given = NOT_FINITE[values]
            leaves[place][line][7 : 7 + len(given)] = torch.tensor(given)
    call = partial(mr.attention, score_mod=case.score_mod, mask_mod=case.mask_mod, return_lse=True)
    with takes(PASSES):
        found = results(call, leaves)
    with mr.float32("simt"):
        expected = results(call, leaves)
    for y, of_simt in zip(found, expected, strict=True):
        there = of_simt.isfinite()
        assert there.any() and torch.equal(y.isfinite(), there)
        torch.testing.assert_close(y[there], of_simt[there], rtol=1e-4, atol=2e-5)


def test_functions_that_are_not_finite(gpu: torch.device) -> None:
    """A score of +inf makes its row NaN, one of -inf has no weight, and a masked slope does not count."""
    leaves = operands(SHAPES[0], torch.float32, gpu)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        score = torch.where((i == 5) & (j == 9), math.inf, score)
        return torch.where(j % 7 == 3, -math.inf, score) + torch.sqrt((j - 2) * 1.0)

    call = partial(mr.attention, score_mod=score_mod, mask_mod=lambda b, h, i, j: j >= 2, return_lse=True)
    with takes(PASSES):
        found = results(call, leaves)
    with mr.float32("simt"):
        expected = results(call, leaves)
    for y, of_simt in zip(found, expected, strict=True):
        assert torch.equal(y.isfinite(), of_simt.isfinite())
        there = of_simt.isfinite()
        torch.testing.assert_close(y[there], of_simt[there], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("make", (mods.alibi, mods.document), ids=lambda m: m.__name__)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_same_bits(shape: tuple[int, ...], make: Any, gpu: torch.device) -> None:
    """In every run, and in the deterministic mode."""
    leaves = operands(shape, torch.float32, gpu)
    case = make(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu)
    call = partial(mr.attention, score_mod=case.score_mod, mask_mod=case.mask_mod, return_lse=True)
    with takes(PASSES):
        first = results(call, leaves)
        for one, other in zip(first, results(call, leaves), strict=True):
            assert torch.equal(one, other)
    torch.use_deterministic_algorithms(True)
    try:
        with takes({FORWARD, IN_ORDER}):
            again = results(call, leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", (by_distance, mods.relative_position), ids=lambda m: m.__name__)
def test_deterministic_tables(make: Any, deterministic: None, gpu: torch.device) -> None:
    """The kernels run twice, and add integers: the same bits, and right ones."""
    shape = SHAPES[1]
    leaves = operands(shape, torch.float32, gpu)
    case = make(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu)
    call = partial(mr.attention, score_mod=case.score_mod, mask_mod=case.mask_mod, return_lse=True)
    before = counts()
    first = results(call, [*leaves, *case.captured])
    taken = {path: n for path, n in (counts() - before).items() if "backward" in path}
    assert taken == {IN_ORDER: 2}
    for one, other in zip(first, results(call, [*leaves, *case.captured]), strict=True):
        assert torch.equal(one, other)
    check(make, shape, torch.float32, gpu)


def test_is_explained(gpu: torch.device) -> None:
    leaves = operands(SHAPES[0], torch.float32, gpu)
    mask: Mod = lambda b, h, i, j: i >= j  # noqa: E731
    explanation = mr.explain("attention", *leaves, mask_mod=mask)
    assert {explanation.forward, explanation.backward} == PASSES
    assert any("float32 as planes of float16" in reason for reason in explanation.reasons)
    with mr.float32("auto"):
        explanation = mr.explain("attention", *leaves, mask_mod=mask)
    assert explanation.backward == "modified_attention_backward/cuda/simt/float32"
    assert any("mr.float32 does not say emulated" in reason for reason in explanation.reasons)


def test_other_calls_say_why(gpu: torch.device) -> None:
    mask: Mod = lambda b, h, i, j: i >= j  # noqa: E731
    for shape, reason in (
        ((2, 18, 6, 201, 333, 192, 64), "the inputs are float32, and a width is 192, more than 128"),
        ((1, 2, 2, 20, 333, 64, 64), "the inputs are float32, and there are few rows"),
    ):
        explanation = mr.explain("attention", *operands(shape, torch.float32, gpu), mask_mod=mask)
        assert explanation.forward == "modified_attention_forward/cuda/simt/float32"
        assert any(reason in text for text in explanation.reasons)
