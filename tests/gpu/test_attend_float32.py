"""attend in planes of float16 (`mr.float32("emulated")`), beside dense torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mods
import pytest
import torch
from modified_calls import Results, assert_rule, operands
from mods import Case, dense
from paths import counts
from tolerance import upstream_gradient
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm90")

FORWARD, BACKWARD = (f"modified_attention_{way}/cuda/planes/float32" for way in ("forward", "backward"))
IN_ORDER = BACKWARD.replace("planes", "planes/deterministic")
PASSES = {FORWARD, BACKWARD}
SIMT = {path.replace("planes", "simt") for path in PASSES}
# B, H, Hkv, M, N, F, D: so many heads that rows are not few.
SHAPES = (
    (2, 18, 6, 201, 333, 64, 64),
    (2, 18, 18, 201, 333, 128, 128),
    (1, 36, 12, 150, 270, 59, 100),
    (1, 34, 17, 190, 300, 104, 56),
)
DRAWS = 8  # error norms are over so many
Make = Callable[..., Case]  # the weight is the score_mod of the case


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """The reference, torch's float32, must not round to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    with mr.float32("emulated"):
        yield


@contextmanager
def takes(paths: set[str]) -> Iterator[None]:
    """Assert that attend takes these paths in the block; other operators may take any."""
    before = counts()
    yield
    assert {path for path in counts() - before if path.startswith("modified_attention")} == paths


def weight_of(case: Case) -> Any:
    """The weight as `attend` takes it, which goes by the names of arguments."""
    function = case.score_mod
    if function is None:
        return lambda score: score
    return lambda score, batch, head, q_idx, kv_idx: function(score, batch, head, q_idx, kv_idx)


def attend(case: Case, blocked: tuple[int, ...] | None = None, **options: Any) -> Any:
    """blocked: B, H, M and N, if the mask is a block mask."""
    masks: dict[str, Any] = {"mask_mod": case.mask_mod}
    if blocked is not None:
        masks = {"block_mask": mr.block_mask(case.mask_mod, *blocked, device="cuda", block_size=64)}
    return partial(mr.attend, weight=weight_of(case), **masks, **options)


def of_torch(case: Case, **options: Any) -> Any:
    given = {"weight": lambda weight: weight, **options}
    return lambda q, k, v: dense(q, k, v, case.score_mod, case.mask_mod, **given)[0]


def results(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    """out, and the gradients of a random linear combination of it."""
    out = call(*leaves[:3])
    torch.manual_seed(1)
    of_out = upstream_gradient(out)
    return [out, *torch.autograd.grad(out, leaves, of_out, allow_unused=True, materialize_grads=True)]


def draw(
    make: Make, shape: tuple[int, ...], gpu: torch.device, seed: int, blocked: bool = False, **options: Any
) -> Results:
    """The results of a draw: ours, in float64, and torch's."""
    torch.manual_seed(seed)
    B, H, _, M, N, *_ = shape
    leaves = operands(shape, torch.float32, gpu)
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def case_in(dtype: torch.dtype) -> Case:
        torch.manual_seed(100 + seed)
        return make(B, H, M, N, dtype=dtype, device=gpu)

    case, exact = case_in(torch.float32), case_in(torch.float64)
    narrow = [*leaves, *case.captured]
    found = results(attend(case, (B, H, M, N) if blocked else None, **options), narrow)
    truth = results(of_torch(exact, **options), [*wide, *exact.captured])
    base = results(of_torch(case, **options), narrow)
    names = ["out", "d_q", "d_k", "d_v", *(f"d_captured{n}" for n in range(len(case.captured)))]
    return dict(zip(names, zip(found, truth, base, strict=True), strict=True))


def check(make: Make, shape: tuple[int, ...], gpu: torch.device, **options: Any) -> None:
    with takes(PASSES):
        assert_rule(partial(draw, make, shape, gpu, **options), torch.float32, max(shape[3:5]))


def plain(weight: Callable[[Any], Any]) -> Make:
    """A weight of the score alone."""

    def make(B: int, H: int, M: int, N: int, **like: Any) -> Case:
        return Case(lambda score, b, h, i, j: weight(score), None)

    return make


def sigmoid_of(of: Make) -> Make:
    """The sigmoid of a modified score, with the mask."""

    def make(*size: int, **like: Any) -> Case:
        case = of(*size, **like)
        function = case.score_mod or (lambda score, *_: score)
        return Case(lambda *element: torch.sigmoid(function(*element) - 1.0), case.mask_mod, case.captured)

    return make


WEIGHTS: dict[str, Make] = {
    "sigmoid": plain(lambda s: torch.sigmoid(s - 2.0)),
    "relu2": plain(lambda s: torch.relu(s) ** 2),
    "power": plain(lambda s: s**4),
    "negative": plain(lambda s: 1.0 + torch.tanh(s) - 0.5 * s),  # not 0 where a column is beyond the last
    "exp": plain(lambda s: torch.exp(s - 1.0)),
    "linear": plain(lambda s: s),
    "tiny": plain(lambda s: 1e-30 * torch.tanh(s)),
    "huge": plain(lambda s: 1e25 * torch.tanh(s)),
    "far_apart": plain(lambda s: torch.exp(8.0 * s)),  # up to e^40, in one row
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, shape: tuple[int, ...], gpu: torch.device) -> None:
    check(WEIGHTS[name], shape, gpu)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", mods.CASES, ids=lambda make: make.__name__)
def test_functions(make: Make, shape: tuple[int, ...], gpu: torch.device) -> None:
    """Weights that depend on indices, masks and captured tensors."""
    check(sigmoid_of(make), shape, gpu)


def infinite_behind_the_last_query(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A number for each head, divided by 1 for queries and by 0 beyond the last one."""
    of_heads = torch.randn(H, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda s, b, h, i, j: s + of_heads[h] / (M - i).clamp(0, 1), None, (of_heads,))


def test_rows_beyond_the_last_query_add_nothing(gpu: torch.device) -> None:
    """201 queries leave rows of the last tile empty. The function gives these rows infinite weights."""
    check(infinite_behind_the_last_query, SHAPES[0], gpu)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
@pytest.mark.parametrize("make", (WEIGHTS["negative"], sigmoid_of(mods.learned)), ids=("negative", "learned"))
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_bands(shape: tuple[int, ...], make: Make, options: dict[str, Any], gpu: torch.device) -> None:
    check(make, shape, gpu, **options)


def few_blocks(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """Whole blocks, tiles that keep nothing, and a head that keeps nothing. Masked weights are not small."""
    return Case(
        lambda s, b, h, i, j: 1.0 + torch.tanh(s),
        lambda b, h, i, j: ((i // 128 - j // 128) % 3 == 1) & (h != 1),
    )


@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=("full", "causal"))
@pytest.mark.parametrize("shape", ((2, 12, 6, 900, 1000, 64, 64), (1, 12, 3, 700, 900, 128, 64)), ids=str)
@pytest.mark.parametrize(
    "make",
    (sigmoid_of(mods.document), sigmoid_of(mods.sliding_window), sigmoid_of(mods.nothing_kept), few_blocks),
    ids=("document", "sliding_window", "nothing_kept", "few_blocks"),
)
def test_block_mask(make: Make, shape: tuple[int, ...], options: dict[str, Any], gpu: torch.device) -> None:
    """Tiles of queries and of keys are skipped, also of heads that share keys."""
    check(make, shape, gpu, blocked=True, **options)


def test_queries_without_keys(gpu: torch.device) -> None:
    """Their outputs, and gradients, are 0."""
    leaves = operands(SHAPES[0], torch.float32, gpu)
    mask = lambda b, h, i, j: (i % 3 != 0) & (h != 1)  # noqa: E731
    with takes(PASSES):
        out, d_q, *_ = results(partial(mr.attend, weight=torch.exp, mask_mod=mask), leaves)
    for y in (out, d_q):
        assert not y[:, :, ::3].any() and not y[:, 1].any() and y[:, 0, 1::3].all()


@pytest.mark.parametrize("name", ("relu2", "exp", "negative"))
@pytest.mark.parametrize("width", (64, 120))
def test_normalized(width: int, name: str, gpu: torch.device) -> None:
    check(WEIGHTS[name], (2, 18, 6, 201, 333, width, width), gpu, normalized=True, causal=name == "exp")


def test_normalized_in_float16(gpu: torch.device) -> None:
    """It computes in float32: the rounded result of the call in float32."""
    leaves = [t.detach().half() for t in operands(SHAPES[0], torch.float32, gpu)]
    call = partial(mr.attend, weight=lambda s: torch.relu(s) ** 2, normalized=True)
    with takes({FORWARD}):
        found = call(*leaves)
    assert torch.equal(found, call(*(t.float() for t in leaves)).half())


def norms(make: Make, width: int, gpu: torch.device, of_lines: bool) -> dict[str, tuple[float, float]]:
    """Norms of the errors of the output and the gradients, over several draws: ours, and torch's in float32.

    of_lines: the errors of each query or key are divided by its own norm first. Otherwise only of captured
    tensors with 64 elements or more: errors of few numbers depend on luck.
    """
    B, H, M, N = 2, 12, 500, 700
    squares: dict[str, Tensor] = {}  # name -> [3]: of our errors, of torch's, of the exact result
    for seed in range(DRAWS):
        of_draw = draw(make, (B, H, 4, M, N, width, width), gpu, seed)
        for name, (ours, exact, theirs) in of_draw.items():
            if exact.numel() >= 64:
                unit = exact.norm(dim=-1, keepdim=True) if of_lines else 1.0
                parts = (ours - exact) / unit, (theirs - exact) / unit, exact / unit
                squares[name] = squares.get(name, 0) + torch.stack([x.norm() for x in parts]) ** 2
    return {name: (float(of[0] / of[2]) ** 0.5, float(of[1] / of[2]) ** 0.5) for name, of in squares.items()}


def by_distance(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A learned entry for each distance up to 20, and one for all beyond, which most elements read."""
    table = torch.randn(H, 41, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda s, b, h, i, j: s + table[h, (j - i).clamp(-20, 20) + 20], None, (table,))


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("name", WEIGHTS)
def test_error_norms(name: str, width: int, gpu: torch.device) -> None:
    """At most 1.25 times those of torch in float32, for normal numbers.

    Of weights up to e^40 the largest one alone would decide, so that each query and key counts alike there.
    """
    for of, (ours, theirs) in norms(WEIGHTS[name], width, gpu, name == "far_apart").items():
        assert ours <= 1.25 * theirs, f"{of}: error norm {ours:.3g}, torch's {theirs:.3g}"


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize(
    "make",
    (mods.alibi, mods.document, mods.relative_position, mods.learned, by_distance),
    ids=lambda m: m.__name__,
)
def test_error_norms_of_functions(make: Make, width: int, gpu: torch.device) -> None:
    """The same with masks and captured tensors.

    Elements add to the entries of relative_position one after another, in float32, and torch adds in pairs.
    """
    for name, (ours, theirs) in norms(sigmoid_of(make), width, gpu, False).items():
        bound = 2.5 if make is mods.relative_position and name == "d_captured0" else 1.25
        assert ours <= bound * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


@pytest.mark.parametrize("wanted", (0, 1, 2), ids=("q", "k", "v"))
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_one_gradient_alone(shape: tuple[int, ...], wanted: int, gpu: torch.device) -> None:
    """Each gradient has a kernel of its own, so it has the same bits whether or not the others are wanted."""
    leaves, call = operands(shape, torch.float32, gpu), partial(mr.attend, weight=torch.sigmoid)
    out = call(*leaves)
    upstream = torch.randn_like(out)
    of_all = torch.autograd.grad(out, leaves, upstream)[wanted]
    given = [t.detach() for t in leaves]
    given[wanted].requires_grad_()
    with takes(PASSES):
        (found,) = torch.autograd.grad(call(*given), given[wanted], upstream)
    assert torch.equal(found, of_all)


def test_a_table_alone(gpu: torch.device) -> None:
    """Its gradient is the one beside all others."""
    shape = SHAPES[1]
    leaves = operands(shape, torch.float32, gpu)
    case = mods.relative_position(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu)
    call = attend(case)
    out = call(*leaves)
    upstream = torch.randn_like(out)
    *_, beside = torch.autograd.grad(out, [*leaves, *case.captured], upstream)
    with takes(PASSES):
        (alone,) = torch.autograd.grad(call(*(t.detach() for t in leaves)), case.captured, upstream)
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-5 * float(beside.abs().max()))


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
    "make",
    (
        WEIGHTS["sigmoid"],
        WEIGHTS["relu2"],
        plain(lambda s: torch.where(s > 0.0, s, 0.0)),  # a number for scores that are NaN
        sigmoid_of(mods.document),
    ),
    ids=("sigmoid", "relu2", "positive", "document"),
)
def test_what_is_not_finite(make: Make, place: int, values: str, gpu: torch.device) -> None:
    """In the places where SIMT kernels have it: a key that is not finite spoils no query that masks it."""
    leaves = operands((2, 17, 17, 130, 200, 128, 128), torch.float32, gpu)
    call = attend(make(2, 17, 130, 200, dtype=torch.float32, device=gpu))
    with torch.no_grad():
        for line in ((1, 2, 100), (0, 1, 60)):
            given = NOT_FINITE[values]
            leaves[place][line][7 : 7 + len(given)] = torch.tensor(given)
    with takes(PASSES):
        found = results(call, leaves)
    with mr.float32("simt"):
        expected = results(call, leaves)
    for y, of_simt in zip(found, expected, strict=True):
        there = of_simt.isfinite()
        assert there.any() and torch.equal(y.isfinite(), there)
        torch.testing.assert_close(y[there], of_simt[there], rtol=1e-4, atol=1e-3)


def test_functions_that_are_not_finite(gpu: torch.device) -> None:
    """An infinite weight makes its query infinite or NaN, and a masked weight or slope does not count."""
    leaves = operands(SHAPES[0], torch.float32, gpu)

    def weight(score: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx == 5) & (kv_idx == 9), math.inf, score) + torch.sqrt((kv_idx - 2) * 1.0)

    call = partial(mr.attend, weight=weight, mask_mod=lambda b, h, i, j: j >= 2)
    with takes(PASSES):
        found = results(call, leaves)
    with mr.float32("simt"):
        expected = results(call, leaves)
    for y, of_simt in zip(found, expected, strict=True):
        there = of_simt.isfinite()
        assert there.any() and torch.equal(y.isfinite(), there)
        torch.testing.assert_close(y[there], of_simt[there], rtol=1e-4, atol=1e-2)  # of sums of about 1e3
    assert not found[0][:, :, 5].isfinite().any()


@pytest.mark.parametrize("make", (WEIGHTS["relu2"], sigmoid_of(mods.document)), ids=("relu2", "document"))
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_same_bits(shape: tuple[int, ...], make: Make, gpu: torch.device) -> None:
    """In every run, and in the deterministic mode."""
    leaves = operands(shape, torch.float32, gpu)
    call = attend(make(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu))
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
def test_deterministic_tables(make: Make, deterministic: None, gpu: torch.device) -> None:
    """The kernels run twice, and add integers: the same bits, and right ones."""
    shape = SHAPES[1]
    leaves = operands(shape, torch.float32, gpu)
    case = sigmoid_of(make)(*shape[:2], *shape[3:5], dtype=torch.float32, device=gpu)
    before = counts()
    first = results(attend(case), [*leaves, *case.captured])
    taken = {path: n for path, n in (counts() - before).items() if "backward" in path}
    assert taken == {IN_ORDER: 2}
    for one, other in zip(first, results(attend(case), [*leaves, *case.captured]), strict=True):
        assert torch.equal(one, other)
    assert_rule(partial(draw, sigmoid_of(make), shape, gpu), torch.float32, max(shape[3:5]))


def test_graph(gpu: torch.device) -> None:
    """A CUDA graph of a step replays it on new inputs."""
    leaves = operands(SHAPES[0], torch.float32, gpu)
    upstream = torch.randn(2, 18, 201, 64, device=gpu)

    def step() -> list[Tensor]:
        out = mr.attend(*leaves, weight=torch.sigmoid)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        leaves[0].normal_()
    graph.replay()
    for replayed, expected in zip(found, step(), strict=True):
        assert torch.equal(replayed, expected)


def test_is_explained(gpu: torch.device) -> None:
    leaves = operands(SHAPES[0], torch.float32, gpu)
    explanation = mr.explain("attend", *leaves, weight=torch.sigmoid)
    assert {explanation.forward, explanation.backward} == PASSES
    assert any("float32 as planes of float16" in reason for reason in explanation.reasons)
    with mr.float32("auto"):
        explanation = mr.explain("attend", *leaves, weight=torch.sigmoid)
    assert {explanation.forward, explanation.backward} == SIMT
    assert any("mr.float32 does not say emulated" in reason for reason in explanation.reasons)


def test_normalized_values_of_width_128(gpu: torch.device) -> None:
    """A column of ones beside them is one too many."""
    leaves = operands(SHAPES[1], torch.float32, gpu)
    explanation = mr.explain("attend", *leaves, weight=torch.relu, normalized=True)
    assert {explanation.forward, explanation.backward} == SIMT
    with takes(SIMT):
        mr.attend(*leaves, weight=torch.relu, normalized=True).sum().backward()
