"""float32 losses and folds on Hopper's tensor cores: as accurate as float32 products summed in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from calls import Kept, peak, requested, reset_peak
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops import slices

pytestmark = pytest.mark.tiers("sm90")

# Of ours to torch's norm of the error (docs/numerics.md). With heavy tails a few large numbers make up a dot
# product, as if it had few terms.
BOUND = {"normal": 1.25, "scaled_rows": 1.4, "heavy_tailed": 2.0, "jsd_heavy_tailed": 2.8}
ROW_GRADIENT = "statistics_row_gradient/cuda/planes/float32"


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with mr.float32("emulated"):
        yield


class Case(NamedTuple):
    """Operands of a head: x [N, D], weight [V, D]."""

    x: Tensor
    weight: Tensor


def normal(rows: int, columns: int, width: int) -> Case:
    scale = width**-0.25  # logits of about 1
    x, w = (torch.randn(n, width, device="cuda") * scale for n in (rows, columns))
    return Case(x, w * 3)


def heavy_tailed(rows: int, columns: int, width: int) -> Case:
    def numbers(count: int) -> Tensor:
        sign = torch.randint(0, 2, (count, width), device="cuda") * 2.0 - 1
        return sign * torch.exp(3 * torch.randn(count, width, device="cuda"))

    x, w = numbers(rows), numbers(columns)
    norm = (x.square().sum(1).mean() * w.square().sum(1).mean()).sqrt()
    return Case(x / norm.sqrt() * 2, w / norm.sqrt() * 2)


def scaled_rows(rows: int, columns: int, width: int) -> Case:
    """Rows of each operand differ in size by up to 2^40."""
    x, w = normal(rows, columns, width)
    return Case(*(t * torch.exp2(torch.randint(-40, 1, (len(t), 1), device="cuda").float()) for t in (x, w)))


def denormal(rows: int, columns: int, width: int) -> Case:
    x, w = normal(rows, columns, width)
    return Case(x * 2.0**-130, w * 2.0**100)


DATA = [normal, heavy_tailed, scaled_rows]
SIZES = [(300, 1000, 128), (257, 515, 203), (512, 2048, 512), (256, 1024, 4096)]


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n > before.get(path, 0)}


def loss_of(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="none")


def ours(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return mr.linear_cross_entropy(x, weight, target, reduction="none")


def with_gradients(
    call: Callable[..., Tensor],
    case: Case | Points | TwoHeads,
    upstream: Tensor,
    *given: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in case]
    result = call(*leaves, *given)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(dtype))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def compare(
    found: list[Tensor], peer: list[Tensor], exact: list[Tensor], least: float, bound: float = BOUND["normal"]
) -> None:
    """least: an error that any float32 result may have, because it is rounded itself."""
    for name, own, other in zip(
        ("result", "dx", "dweight"), errors(found, exact), errors(peer, exact), strict=True
    ):
        assert own <= max(bound * other, least), f"{name}: {own:.3g} beside torch's {other:.3g}"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("data", DATA)
def test_cross_entropy(data: Callable[..., Case], sizes: tuple[int, int, int]) -> None:
    rows, columns, _ = sizes
    case, upstream = data(*sizes), torch.randn(rows, device="cuda")
    target = torch.randint(columns, (rows,), device="cuda")
    before = mr._C.path_counts()
    found = with_gradients(ours, case, upstream, target, dtype=torch.float32)
    assert ran(before) == {f"cross_entropy_{which}/cuda/planes/float32" for which in ("forward", "backward")}
    peer = with_gradients(loss_of, case, upstream, target, dtype=torch.float32)
    exact = with_gradients(loss_of, case, upstream, target, dtype=torch.float64)
    compare(found, peer, exact, 2.0**-24, BOUND[data.__name__])


@mr.statistics
def gaussian(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(sum=mr.stat.total(mass * torch.exp(score - half - other_half)))


@mr.statistics
def nearest(score: Any, half: Any) -> Any:
    return dict(best=mr.stat.largest(score - half, 5))


class Points(NamedTuple):
    """x [N, D], y [M, D] and positive masses [M]."""

    x: Tensor
    y: Tensor
    mass: Tensor


def points(rows: int, columns: int, width: int) -> Points:
    x, y = (torch.randn(n, width, device="cuda") for n in (rows, columns))
    return Points(x, y, torch.rand(columns, device="cuda") + 0.1)


@mr.statistics
def soft_minimum(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(lse=mr.stat.softmax(score - half - other_half + torch.log(mass)).logsumexp)


@mr.statistics
def closest(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(best=mr.stat.largest(score - half - other_half + mass))


# A fold of points, its result, and the same of all exponents [N, M] and masses by torch.
FOLDS: dict[str, tuple[Any, Callable[[Any], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sums": (gaussian, lambda found: found.sum, lambda e, mass: (mass * e.exp()).sum(1)),
    "logarithms": (soft_minimum, lambda found: found.lse, lambda e, mass: (e + mass.log()).logsumexp(1)),
    "closest": (closest, lambda found: found.best.value, lambda e, mass: (e + mass).amax(1)),
}


def halves(t: Tensor) -> Tensor:
    return t.square().sum(1) / (2 * t.shape[1])


def fold_of_points(name: str, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    fold, result, _ = FOLDS[name]
    columns = {"other_half": halves(y), "mass": mass}
    return result(fold(x, y, row={"half": halves(x)}, column=columns, scale=1 / x.shape[1]))


def of_points(name: str, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    exponents = (x @ y.T) / x.shape[1] - halves(x)[:, None] - halves(y)
    return FOLDS[name][2](exponents, mass)


@pytest.mark.parametrize("width", (64, 128, 512))
def test_kernel_sums(width: int) -> None:
    """A user's fold. Gradients up to 128 wide are summed on chip, those of wider points are products."""
    case, upstream = points(400, 1111, width), torch.randn(400, device="cuda")
    own, peer = (functools.partial(call, "sums") for call in (fold_of_points, of_points))
    before = mr._C.path_counts()
    found = with_gradients(own, case, upstream, dtype=torch.float32)
    of_backward = "row_gradient" if width <= 128 else "local_gradient"
    paths = {f"statistics_{which}/cuda/planes/float32" for which in ("fold", of_backward)}
    assert {path for path in ran(before) if path.startswith("statistics_")} >= paths
    compare(
        found[:3],
        with_gradients(peer, case, upstream, dtype=torch.float32)[:3],
        with_gradients(peer, case, upstream, dtype=torch.float64)[:3],
        2.0**-23,
    )


# Rows, columns, width: whole tiles; ragged ones; padded widths; a single tile; many parts of the columns.
SIZES_OF_POINTS = [
    (128, 128, 64),
    (300, 1000, 64),
    (257, 515, 59),
    (64, 64, 128),
    (65, 4099, 128),
    (4099, 65, 100),
    (5000, 7000, 64),
    (3001, 2003, 128),
]


@pytest.mark.parametrize("sizes", SIZES_OF_POINTS, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_gradients_on_chip(name: str, sizes: tuple[int, int, int]) -> None:
    """Of both operands and of all data. Ten runs have the same bits."""
    case, upstream = points(*sizes), torch.randn(sizes[0], device="cuda")
    own, peer = (functools.partial(call, name) for call in (fold_of_points, of_points))
    before = mr._C.path_counts()
    found = with_gradients(own, case, upstream, dtype=torch.float32)
    assert ran(before) == {f"statistics_{of}/cuda/planes/float32" for of in ("fold", "row_gradient")}
    of_torch = with_gradients(peer, case, upstream, dtype=torch.float32)
    exact = with_gradients(peer, case, upstream, dtype=torch.float64)
    for error, other in zip(errors(found, exact), errors(of_torch, exact), strict=True):
        assert error <= max(BOUND["normal"] * other, 2.0**-22), f"{error:.3g} beside torch's {other:.3g}"
    for _ in range(9):
        again = with_gradients(own, case, upstream, dtype=torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("which", range(3), ids=("x", "y", "mass"))
def test_one_gradient_on_chip(which: int) -> None:
    case, upstream = points(300, 1111, 64), torch.randn(300, device="cuda")
    every = with_gradients(functools.partial(fold_of_points, "sums"), case, upstream, dtype=torch.float32)
    leaf = case[which].detach().clone().requires_grad_()
    given = [leaf if n == which else t.detach() for n, t in enumerate(case)]
    before = mr._C.path_counts()
    (found,) = torch.autograd.grad(fold_of_points("sums", *given), leaf, upstream)
    assert ROW_GRADIENT in ran(before)
    torch.testing.assert_close(found, every[1 + which], rtol=1e-6, atol=1e-7)


def test_compiled_gradients_on_chip() -> None:
    """Of a width that kernels pad: torch.compile expects contiguous gradients."""
    case, upstream = points(300, 515, 59), torch.randn(300, device="cuda")
    own = functools.partial(fold_of_points, "sums")
    found = with_gradients(own, case, upstream, dtype=torch.float32)
    before = mr._C.path_counts()
    mr.set_float32("emulated")  # a compiled backward pass is outside of the block around its forward pass
    try:
        compiled = with_gradients(torch.compile(own, fullgraph=True), case, upstream, dtype=torch.float32)
    finally:
        mr.set_float32("auto")
    assert ROW_GRADIENT in ran(before)
    for a, b in zip(compiled, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@mr.statistics
def of_groups(score: Any, column: Any, group: Any, kind: Any) -> Any:
    hit = torch.where(group == kind, 2 * score, score) + 0.125 * torch.where(column > 100, score, 0.0)
    return dict(mean=mr.stat.softmax(score).mean(hit))


def test_integers_on_chip() -> None:
    """Those of rows and of columns, and the indices of columns."""
    (x, y, _), upstream = points(300, 777, 64), torch.randn(300, device="cuda")
    group, kind = (torch.randint(5, (n,), device="cuda") for n in (300, 777))

    def run(dtype: torch.dtype, own: bool) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)]
        if own:
            result = of_groups(*leaves, row={"group": group}, column={"kind": kind}, scale=0.25).mean
        else:
            score = 0.25 * leaves[0] @ leaves[1].T
            hit = torch.where(group[:, None] == kind, 2 * score, score)
            hit = hit + 0.125 * torch.where(torch.arange(777, device="cuda") > 100, score, 0.0)
            result = (score.softmax(1) * hit).sum(1)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(dtype))]

    before = mr._C.path_counts()
    found = run(torch.float32, True)
    assert ROW_GRADIENT in ran(before)
    compare(
        found,
        run(torch.float32, False),
        run(torch.float64, False),
        2.0**-22,
    )


@pytest.mark.parametrize("of_rows", (True, False), ids=("rows", "columns"))
def test_nan_stays_in_gradients_on_chip(of_rows: bool) -> None:
    """In the rows that have it, and in the gradients that are sums over them."""
    case, upstream = points(300, 500, 64), torch.randn(300, device="cuda")
    (case.x if of_rows else case.y)[17, 5] = math.nan
    before = mr._C.path_counts()
    own = functools.partial(fold_of_points, "sums")
    _, dx, dy, _ = with_gradients(own, case, upstream, dtype=torch.float32)
    assert ROW_GRADIENT in ran(before)
    assert dx.isnan().all(1).tolist() == [not of_rows or row == 17 for row in range(300)]
    assert dy.isnan().all(1).tolist() == [of_rows or row == 17 for row in range(500)]


def test_nearest_neighbours() -> None:
    x, y = (torch.randn(n, 128, device="cuda") for n in (300, 5000))
    half = y.square().sum(1) / 2
    before = mr._C.path_counts()
    found = nearest(x, y, column={"half": half}).best
    assert ran(before) == {"statistics_fold/cuda/planes/float32"}
    exact = (x.double() @ y.double().T - half.double()).topk(5)
    torch.testing.assert_close(found.value.double(), exact.values, rtol=1e-6, atol=1e-5)
    assert torch.equal(found.index, exact.indices)


def test_denormal_rows() -> None:
    """Rows of denormal numbers keep the digits that they have."""
    case, target = denormal(64, 300, 128), torch.randint(300, (64,), device="cuda")
    found = ours(*case, target)
    exact = loss_of(case.x.double(), case.weight.double(), target)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


OPTIONS: dict[str, dict[str, object]] = {
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "class_weight": {"class_weight": True, "label_smoothing": 0.1},
    "scale": {"logit_scale": 0.5, "reduction": "mean"},
}


@pytest.mark.parametrize("named", OPTIONS)
def test_options(named: str) -> None:
    """Ignored tokens hold NaN; operands are not contiguous, and no size is a multiple of 8."""
    rows, columns, width = 301, 1003, 133
    options = dict(OPTIONS[named])
    x = torch.randn(width, rows, device="cuda").T * width**-0.5
    weight = torch.randn(columns, 2 * width, device="cuda")[:, ::2]
    target = torch.randint(columns, (rows,), device="cuda")
    target[::7] = -100
    x[::7] = math.nan
    for name in ("bias", "class_weight"):
        if options.get(name):
            options[name] = torch.rand(columns, device="cuda") + 0.5
    reduction = options.setdefault("reduction", "none")
    upstream = torch.randn(() if reduction == "mean" else rows, device="cuda")

    def run(dtype: torch.dtype, device: str) -> list[Tensor]:
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (x, weight)]
        given = {k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        if "bias" in given:
            leaves.append(given["bias"].requires_grad_())
        loss = mr.linear_cross_entropy(leaves[0], leaves[1], target.to(device), **given)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(device, dtype))]

    before = mr._C.path_counts()
    found = run(torch.float32, "cuda")
    assert all("/planes/" in path for path in ran(before))
    exact = run(torch.float64, "cpu")
    for own, of in zip(found, exact, strict=True):
        kept = of.isfinite()
        assert torch.equal(own.isfinite().cpu(), kept)
        assert float((own.cpu().double() - of)[kept].norm() / of[kept].norm()) < 1e-6


@pytest.fixture
def small_log_sum_exps_keep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_NARROWEST_TO_SAVE", 0)
    monkeypatch.setattr(slices, "_FEWEST_TERMS_TO_SAVE", 0)


@pytest.mark.parametrize("keeps", (False, True), ids=("computed again", "kept"))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("data", DATA)
def test_logsumexp_matmul(
    data: Callable[..., Case], sizes: tuple[int, int, int], keeps: bool, small_log_sum_exps_keep_too: None
) -> None:
    rows, columns, _ = sizes
    case, upstream = data(*sizes), torch.randn(rows, device="cuda")

    def peer(a: Tensor, b: Tensor) -> Tensor:
        return torch.logsumexp(a @ b.T, 1)

    before = mr._C.path_counts()
    with mr.workspace(5 * rows * columns if keeps else 2048 * rows), Kept() as kept:
        found = with_gradients(mr.logsumexp_matmul, case, upstream, dtype=torch.float32)
    assert kept.classes == [-(-columns // 8) * 8 if keeps else 0]
    assert ran(before) == {f"logsumexp_{way}/cuda/planes/float32" for way in ("forward", "backward")}
    peers = with_gradients(peer, case, upstream, dtype=torch.float32)
    exact = with_gradients(peer, case, upstream, dtype=torch.float64)
    # Beyond twice torch's error by up to 2^-20 (H200). That tensor cores truncate sums may be why.
    least = 2.0**-24 if data is normal else 2.0**-20
    compare(found, peers, exact, least, BOUND[data.__name__])


@pytest.mark.parametrize("upstream", ("expanded", "strided"))
def test_kept_local_gradients_of_a_log_sum_exp(upstream: str, small_log_sum_exps_keep_too: None) -> None:
    """They serve twice, and one gradient alone has the bits that it has beside the other."""
    leaves = [t.requires_grad_() for t in normal(300, 1000, 256)]
    given = torch.randn(300, 2, device="cuda")[:, 0]
    grad = given[:1].expand(300) if upstream == "expanded" else given
    with Kept() as kept:
        lse = mr.logsumexp_matmul(*leaves)
    assert kept.classes == [1000]
    both = torch.autograd.grad(lse, leaves, grad, retain_graph=True)
    for leaf, of_both in zip(leaves, both, strict=True):
        (alone,) = torch.autograd.grad(lse, leaf, grad, retain_graph=True)
        assert torch.equal(alone, of_both)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad((wide[0] @ wide[1].T).logsumexp(1), wide, grad.double())
    for found, expected in zip(both, exact, strict=True):
        assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


def test_memory_of_a_log_sum_exp_that_keeps_local_gradients() -> None:
    """Between the passes 4 bytes for each; planes of a quarter of them are beside them in backward."""
    rows, columns, width = 4096, 8192, 512
    leaves = [t.requires_grad_() for t in normal(rows, columns, width)]
    grad = torch.randn(rows, device="cuda")
    with mr.workspace(5 * rows * columns):
        torch.autograd.grad(mr.logsumexp_matmul(*leaves), leaves, grad)
        before = reset_peak()
        lse = mr.logsumexp_matmul(*leaves)
        assert 4 * rows * columns <= requested() - before < 4 * rows * columns + (1 << 20)
        torch.autograd.grad(lse, leaves, grad)
    operands = 4 * width * (rows + columns)  # as many bytes as their gradients, and as their planes
    assert peak() - before < 5 * rows * columns + 2 * operands + (4 << 20)


@pytest.mark.parametrize("kept", (False, True), ids=("all", "kept"))
def test_log_probs(kept: bool) -> None:
    x, weight = normal(300, 1000, 256)
    chosen = torch.rand(300, 1000, device="cuda").argsort(1)[:, :50]  # distinct classes
    target = chosen[:, 0]
    words = mr.pack_classes(chosen, 1000) if kept else None
    upstream = torch.randn(2, 300, device="cuda")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        found = mr.linear_log_probs(x, weight, target, entropy=True, kept=words)
        assert found.entropy is not None
        return torch.stack((found.log_probs, found.entropy))

    def peer(x: Tensor, weight: Tensor) -> Tensor:
        logits = x @ weight.T
        if kept:
            logits = torch.full_like(logits, -math.inf).scatter(1, chosen, logits.gather(1, chosen))
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(1)
        return torch.stack((log_p.gather(1, target[:, None])[:, 0], entropy))

    before = mr._C.path_counts()
    found = with_gradients(run, Case(x, weight), upstream, dtype=torch.float32)
    assert all("/planes/" in path for path in ran(before))
    given = (Case(x, weight), upstream)
    compare(
        found,
        with_gradients(peer, *given, dtype=torch.float32),
        with_gradients(peer, *given, dtype=torch.float64),
        2.0**-23,
    )


@pytest.mark.parametrize("of_rows", (True, False), ids=("rows", "columns"))
@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_infinities_and_nan_stay_in_their_rows(value: float, of_rows: bool) -> None:
    a, b = normal(300, 500, 192)
    (a if of_rows else b)[17, 5] = value
    found, exact = mr.logsumexp_matmul(a, b), torch.logsumexp(a.double() @ b.double().T, 1)
    assert torch.equal(found.isnan(), exact.isnan())
    there = exact.isfinite()
    torch.testing.assert_close(found[there].double(), exact[there], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[~there & ~exact.isnan()].double(), exact[~there & ~exact.isnan()])


def test_same_bits_every_time() -> None:
    case, target = normal(512, 4096, 640), torch.randint(4096, (512,), device="cuda")
    upstream = torch.randn(512, device="cuda")
    first, again = (with_gradients(ours, case, upstream, target, dtype=torch.float32) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_slices_do_not_change_the_result() -> None:
    """With the smallest workspace many slices of classes are added up."""
    case, target = normal(256, 3000, 128), torch.randint(3000, (256,), device="cuda")
    upstream = torch.randn(256, device="cuda")
    whole = with_gradients(ours, case, upstream, target, dtype=torch.float32)
    with mr.workspace(8 * 256 * 256):
        sliced = with_gradients(ours, case, upstream, target, dtype=torch.float32)
    for one, other in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Two scores: a student's and a teacher's


class TwoHeads(NamedTuple):
    """x [N, D], weight [V, D], teacher_x [N, E], teacher_weight [V, E]."""

    x: Tensor
    weight: Tensor
    teacher_x: Tensor
    teacher_weight: Tensor


def two_heads(data: Callable[..., Case], rows: int, columns: int, width: int, teacher_width: int) -> TwoHeads:
    return TwoHeads(*data(rows, columns, width), *data(rows, columns, teacher_width))


def divergence(loss: str, student: Tensor, teacher: Tensor) -> Tensor:
    """Of logits, for each row."""
    p, q = student.log_softmax(1), teacher.log_softmax(1)
    if loss == "cross_entropy":
        return -(q.exp() * p).sum(1)
    if loss == "forward_kl":
        return (q.exp() * (q - p)).sum(1)
    if loss == "reverse_kl":
        return (p.exp() * (p - q)).sum(1)
    middle = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * (q.exp() * (q - middle) + p.exp() * (p - middle)).sum(1)


def distilled(loss: str, temperature: float = 1.0) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Our loss of each token, and torch's."""

    def own(*tensors: Tensor) -> Tensor:
        options: Any = {"loss": loss, "temperature": temperature, "reduction": "none", "teacher_grad": True}
        return mr.linear_distillation(*tensors, **options)

    def peer(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        return divergence(loss, x @ weight.T / temperature, teacher_x @ teacher_weight.T / temperature)

    return own, peer


def compare_all(found: list[Tensor], peer: list[Tensor], exact: list[Tensor], bound: float) -> None:
    """`compare`, for any number of results."""
    for n, (own, other) in enumerate(zip(errors(found, exact), errors(peer, exact), strict=True)):
        assert own <= max(bound * other, 2.0**-23), f"result {n}: {own:.3g} beside torch's {other:.3g}"


LOSSES = ("cross_entropy", "forward_kl", "reverse_kl", "jsd")
SIZES_OF_HEADS = [(300, 1000, 128, 192), (257, 515, 203, 131), (512, 2048, 1024, 512), (256, 1024, 640, 4096)]


@pytest.mark.parametrize("sizes", SIZES_OF_HEADS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_distillation(loss: str, sizes: tuple[int, int, int, int]) -> None:
    heads, upstream = two_heads(normal, *sizes), torch.randn(sizes[0], device="cuda")
    own, peer = distilled(loss, temperature=2.0 if sizes[0] == 300 else 1.0)
    before = mr._C.path_counts()
    found = with_gradients(own, heads, upstream, dtype=torch.float32)
    passes = ("statistics_fold", "statistics_local_gradient")
    if loss != "jsd":
        passes = ("distillation_forward", "distillation_backward")
    assert ran(before) == {f"{name}/cuda/planes/float32" for name in passes}
    torchs, exact = (
        with_gradients(peer, heads, upstream, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    compare_all(found, torchs, exact, BOUND["normal"])


@pytest.fixture
def in_planes() -> Iterator[None]:
    """Asserts that no pass of the test takes other kernels."""
    before = mr._C.path_counts()
    yield
    paths = ran(before)
    assert paths and all("/planes/" in path for path in paths), paths


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("sizes", SIZES_OF_HEADS, ids=str)
@pytest.mark.parametrize("data", (scaled_rows, heavy_tailed))
@pytest.mark.parametrize("loss", LOSSES)
def test_distillation_of_uneven_numbers(
    loss: str, data: Callable[..., Case], sizes: tuple[int, int, int, int]
) -> None:
    """A few tokens and classes make up these norms, so one draw says little. "jsd" is at most log 2, however
    large scores are, so that its value shows their error as it is."""
    own, peer = distilled(loss)
    ratios = []
    for _ in range(9):
        heads, upstream = two_heads(data, *sizes), torch.randn(sizes[0], device="cuda")
        found, torchs, exact = (
            with_gradients(call, heads, upstream, dtype=dtype)
            for call, dtype in ((own, torch.float32), (peer, torch.float32), (peer, torch.float64))
        )
        pairs = zip(errors(found, exact), errors(torchs, exact), strict=True)
        ratios.append([error / max(of_torch, 2.0**-24) for error, of_torch in pairs])
    value, *gradients = torch.tensor(ratios).median(0).values.tolist()
    bound = BOUND[data.__name__]
    assert all(ratio <= bound for ratio in gradients), ratios
    assert value <= (BOUND["jsd_heavy_tailed"] if loss == "jsd" and data is heavy_tailed else bound), ratios


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("which", range(4), ids=TwoHeads._fields)
@pytest.mark.parametrize("loss", ("forward_kl", "reverse_kl", "jsd"))
def test_one_gradient_of_distillation(loss: str, which: int) -> None:
    heads, upstream = two_heads(normal, 300, 1000, 192, 256), torch.randn(300, device="cuda")

    def gradient(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        tensors = [t.to(dtype) for t in heads]
        tensors[which].requires_grad_()
        return [torch.autograd.grad(call(*tensors), tensors[which], upstream.to(dtype))[0]]

    own, peer = distilled(loss)
    found = gradient(own, torch.float32)
    compare_all(found, gradient(peer, torch.float32), gradient(peer, torch.float64), BOUND["normal"])


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("loss", ("forward_kl", "jsd"))
def test_masked_tokens_of_distillation(loss: str, reduction: str) -> None:
    """They hold NaN, and get a loss and gradients of 0. The teacher is frozen."""
    heads, mask = two_heads(normal, 400, 1111, 136, 264), torch.rand(400, device="cuda") < 0.6
    own = [t.clone() for t in heads]
    own[0][~mask], own[2][~mask] = math.nan, math.nan
    leaves = [t.requires_grad_() for t in own[:2]]
    found = mr.linear_distillation(*leaves, *own[2:], loss=loss, mask=mask, reduction=reduction)
    upstream = torch.randn(found.shape, device="cuda")
    gradients = torch.autograd.grad(found, leaves, upstream)
    assert not gradients[0][~mask].any()

    def of_torch(dtype: torch.dtype) -> list[Tensor]:
        x, weight, *teacher = (t.to(dtype) for t in heads)
        of_torch = [x.requires_grad_(), weight.requires_grad_()]
        losses = distilled(loss)[1](*of_torch, *teacher)
        losses = torch.where(mask, losses, 0)
        if reduction != "none":
            losses = losses.sum() / (mask.sum() if reduction == "mean" else 1)
        return [losses.detach(), *torch.autograd.grad(losses, of_torch, upstream.to(dtype))]

    compare_all(
        [found.detach(), *gradients], of_torch(torch.float32), of_torch(torch.float64), BOUND["normal"]
    )


@pytest.mark.usefixtures("in_planes")
def test_hard_labels_of_distillation() -> None:
    heads, upstream = two_heads(normal, 300, 1000, 128, 192), torch.randn(300, device="cuda")
    target = torch.randint(1000, (300,), device="cuda")

    def own(*tensors: Tensor) -> Tensor:
        options: Any = {"loss": "forward_kl", "temperature": 2.0, "hard_weight": 0.3, "reduction": "none"}
        return mr.linear_distillation(*tensors, target=target, teacher_grad=True, **options)

    def peer(*tensors: Tensor) -> Tensor:
        x, weight, *_ = tensors
        hard = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="none")
        return 0.7 * distilled("forward_kl", 2.0)[1](*tensors) + 0.3 * hard

    found, torchs, exact = (
        with_gradients(call, heads, upstream, dtype=dtype)
        for call, dtype in ((own, torch.float32), (peer, torch.float32), (peer, torch.float64))
    )
    compare_all(found, torchs, exact, BOUND["normal"])


@pytest.mark.usefixtures("in_planes")
def test_distillation_repeats_its_bits() -> None:
    heads, upstream = two_heads(normal, 512, 4096, 640, 384), torch.randn(512, device="cuda")
    for loss in ("forward_kl", "jsd"):
        own, _ = distilled(loss)
        first, again = (with_gradients(own, heads, upstream, dtype=torch.float32) for _ in range(2))
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_slices_of_distillation() -> None:
    """With the smallest workspace many slices of classes are added up."""
    heads, upstream = two_heads(normal, 256, 3000, 128, 192), torch.randn(256, device="cuda")
    for loss in ("forward_kl", "jsd"):
        own, _ = distilled(loss)
        whole = with_gradients(own, heads, upstream, dtype=torch.float32)
        before = mr._C.path_counts()
        with mr.workspace(2 * 8 * 256 * 256):
            sliced = with_gradients(own, heads, upstream, dtype=torch.float32)
        assert all("/planes/" in path for path in ran(before))
        for one, other in zip(whole, sliced, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("value", (math.inf, math.nan))
@pytest.mark.parametrize("which", ("x", "teacher_x"))
def test_nan_of_one_token_stays_there(which: str, value: float) -> None:
    heads, upstream = two_heads(normal, 300, 500, 192, 256), torch.randn(300, device="cuda")
    getattr(heads, which)[17, 5] = value
    own, _ = distilled("forward_kl")
    loss, dx, _, dteacher_x, _ = with_gradients(own, heads, upstream, dtype=torch.float32)
    others = torch.arange(300, device="cuda") != 17
    assert loss[17].isnan()
    assert all(t[others].isfinite().all() for t in (loss, dx, dteacher_x))


@mr.statistics
def agreement(score: Any, other: Any, column: Any, label: Any, weight: Any) -> Any:
    p = mr.stat.softmax(score)
    return dict(
        lse=p.logsumexp,
        mean=p.mean(torch.tanh(other)),
        total=mr.stat.total(weight * torch.sin(score - other)),
        target=mr.stat.total(torch.where(column == label, score * other, 0.0)),
    )


@pytest.mark.parametrize("sizes", SIZES_OF_HEADS[:3], ids=str)
def test_largest_of_two_scores(sizes: tuple[int, int, int, int]) -> None:
    """The k largest values of a function of both scores, and their columns."""

    @mr.statistics
    def best(score: Any, other: Any) -> Any:
        return dict(best=mr.stat.largest(score - 0.5 * other, 5))

    heads = two_heads(normal, *sizes)
    before = mr._C.path_counts()
    found = best(heads.x, heads.weight, other_a=heads.teacher_x, other_b=heads.teacher_weight).best
    assert ran(before) == {"statistics_fold/cuda/planes/float32"}
    x, weight, other_x, other_weight = (t.double() for t in heads)
    scores = x @ weight.T - 0.5 * other_x @ other_weight.T
    expected = scores.topk(5).values
    torch.testing.assert_close(found.value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.gather(1, found.index), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES_OF_HEADS[:3], ids=str)
def test_folds_of_two_scores(sizes: tuple[int, int, int, int]) -> None:
    rows, columns, *_ = sizes
    heads, upstream = two_heads(normal, *sizes), torch.randn(rows, device="cuda")
    label, of_column = torch.randint(columns, (rows,), device="cuda"), torch.rand(columns, device="cuda")

    def own(x: Tensor, weight: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        found = agreement(
            x, weight, other_a=other_x, other_b=other_weight, label=label, column={"weight": of_column}
        )
        return found.lse + found.mean + found.total / columns + found.target

    def peer(x: Tensor, weight: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        score, other = x @ weight.T, other_x @ other_weight.T
        total = (of_column.to(x.dtype) * torch.sin(score - other)).sum(1) / columns
        target = (score * other).gather(1, label[:, None])[:, 0]
        return score.logsumexp(1) + (score.softmax(1) * other.tanh()).sum(1) + total + target

    before = mr._C.path_counts()
    found = with_gradients(own, heads, upstream, dtype=torch.float32)
    paths = "statistics_fold", "statistics_local_gradient"
    assert ran(before) == {f"{path}/cuda/planes/float32" for path in paths}
    torchs, exact = (
        with_gradients(peer, heads, upstream, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    compare_all(found, torchs, exact, BOUND["normal"])


# A mean or a sum: gradients in the forward pass, some tokens at a time


def in_parts(sizes: tuple[int, int, int]) -> dict[str, int]:
    """The option `workspace` with which a call has parts of at most 512 tokens."""
    return {"workspace": 5 * 512 * sizes[1]}


def mean_of(options: dict[str, Any]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Our mean of the losses, or what the options say, and torch's."""
    of_torch = {name: value for name, value in options.items() if name not in ("workspace", "z_loss")}

    def peer(x: Tensor, weight: Tensor, target: Tensor, *class_weight: Tensor) -> Tensor:
        logits = x @ weight.T
        of_class = class_weight[0].to(x.dtype) if class_weight else None
        loss = torch.nn.functional.cross_entropy(logits, target, of_class, **of_torch)
        counted = target != -100
        squares = torch.where(counted, logits.logsumexp(1).square(), 0).sum()
        if options.get("reduction") != "sum":
            squares = squares / (
                class_weight[0].to(x.dtype)[target[counted]].sum() if class_weight else counted.sum()
            )
        return loss + options.get("z_loss", 0.0) * squares

    def own(x: Tensor, weight: Tensor, target: Tensor, *class_weight: Tensor) -> Tensor:
        of_class = class_weight[0] if class_weight else None
        return mr.linear_cross_entropy(x, weight, target, class_weight=of_class, **options)

    return own, peer


@pytest.mark.parametrize("sizes", [(300, 1500, 128), (1100, 1111, 4096), (1537, 2048, 3072)])
@pytest.mark.parametrize("data", DATA)
def test_parts(data: Callable[..., Case], sizes: tuple[int, int, int]) -> None:
    rows, columns, _ = sizes
    case, upstream = data(*sizes), torch.tensor(0.75, device="cuda")
    target = torch.randint(columns, (rows,), device="cuda")
    own, peer = mean_of(in_parts(sizes))
    explained = mr.explain("linear_cross_entropy", *case, target, **in_parts(sizes))
    assert any("tokens at a time" in reason for reason in explained.reasons)
    before = mr._C.path_counts()
    found = with_gradients(own, case, upstream, target, dtype=torch.float32)
    assert ran(before) == {explained.forward, explained.backward}
    given = case, upstream, target
    compare(
        found,
        with_gradients(peer, *given, dtype=torch.float32),
        with_gradients(peer, *given, dtype=torch.float64),
        2.0**-24,
        BOUND[data.__name__],
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1, "z_loss": 1e-3},
        {"class_weight": True, "z_loss": 1e-3},
    ],
    ids=str,
)
def test_options_of_parts(options: dict[str, Any]) -> None:
    """A third of the tokens is ignored."""
    sizes = (1100, 1111, 4096)
    case, upstream = normal(*sizes), torch.tensor(3.0, device="cuda")
    target = torch.randint(sizes[1], (sizes[0],), device="cuda")
    target[::3] = -100
    classes = [torch.rand(sizes[1], device="cuda") + 0.5] if "class_weight" in options else []
    rest = {name: value for name, value in options.items() if name != "class_weight"}
    own, peer = mean_of(rest | in_parts(sizes))
    given = case, upstream, target, *classes
    found = with_gradients(own, *given, dtype=torch.float32)
    roundings = 3 if classes else 1  # a mean by class weights is a quotient of two rounded sums
    compare(
        found,
        with_gradients(peer, *given, dtype=torch.float32),
        with_gradients(peer, *given, dtype=torch.float64),
        roundings * 2.0**-24,
    )
    with torch.no_grad():
        case.x[::3] = math.nan
    of_nan = with_gradients(own, *given, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(of_nan, found, strict=True))


def test_parts_of_a_retained_graph() -> None:
    """Also second derivatives, one gradient alone, and the same bits every time."""
    sizes = (1100, 1111, 4096)
    (x, weight), own = (t.requires_grad_() for t in normal(*sizes)), mean_of(in_parts(sizes))[0]
    target = torch.randint(sizes[1], (sizes[0],), device="cuda")
    loss = own(x, weight, target)
    first = torch.autograd.grad(2 * loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (x, weight))
    again = torch.autograd.grad(2 * own(x, weight, target), (x, weight))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, again, strict=True))
    for which, leaf in enumerate((x, weight)):
        given = [t if t is leaf else t.detach() for t in (x, weight)]
        assert torch.equal(torch.autograd.grad(2 * own(*given, target), leaf)[0], first[which])
    (once,) = torch.autograd.grad(own(x, weight, target), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target)
    (once,) = torch.autograd.grad(exact, wide[0], create_graph=True)
    (of_exact,) = torch.autograd.grad(once.square().sum(), wide[1])
    assert (twice - of_exact).norm() <= 1e-5 * of_exact.norm()


def test_memory_of_parts() -> None:
    """Beyond the gradients: the workspace, and planes of the weight and of the tokens of a part."""
    sizes = rows, columns, width = 2048, 20000, 4096
    x, weight = (t.requires_grad_() for t in normal(*sizes))
    target = torch.randint(columns, (rows,), device="cuda")
    own, workspace = mean_of(in_parts(sizes))[0], in_parts(sizes)["workspace"]
    for _ in range(2):
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        own(x, weight, target).backward()
    used = torch.cuda.max_memory_allocated() - before
    gradients, of_rows = 4 * width * (rows + columns), 4 * 512 * width
    assert used < gradients + workspace + (4 * width + 16) * columns + 4 * of_rows + (8 << 20)


def test_other_reductions_take_slices() -> None:
    case, target = normal(300, 1500, 128), torch.randint(1500, (300,), device="cuda")
    for options in ({"reduction": "none"}, {"return_lse": True}):
        explained = mr.explain("linear_cross_entropy", *case, target, **options)
        assert not any("tokens at a time" in reason for reason in explained.reasons)


def test_a_mode_also_holds_for_the_backward_pass() -> None:
    """Which runs in a thread of its own, outside of the block."""
    case, target = normal(128, 300, 128), torch.randint(300, (128,), device="cuda")
    for mode, tier in (("emulated", "planes"), ("simt", "simt"), ("auto", "simt")):
        x, weight = (t.detach().requires_grad_() for t in case)
        before = mr._C.path_counts()
        with mr.float32(mode):
            loss = mr.linear_cross_entropy(x, weight, target)
        with mr.float32("auto"):
            loss.backward()
        found = {f"cross_entropy_{which}/cuda/{tier}/float32" for which in ("forward", "backward")}
        assert ran(before) == found


def test_gradients_of_narrow_operands_take_ordinary_cores() -> None:
    """The forward pass does not."""
    a, b = (t.requires_grad_() for t in normal(300, 500, 64))
    found = mr.explain("logsumexp_matmul", a, b)
    assert found.forward == "logsumexp_forward/cuda/planes/float32"
    assert found.backward == "logsumexp_backward/cuda/simt/float32"
    before = mr._C.path_counts()
    mr.logsumexp_matmul(a, b).sum().backward()
    assert ran(before) == {found.forward, found.backward}


@pytest.mark.parametrize("sizes", [(63, 500, 128), (500, 63, 128), (500, 500, 56)])
def test_few_terms_take_ordinary_cores(sizes: tuple[int, int, int]) -> None:
    """Products of fewer terms would be less accurate than those of float32."""
    a, b = normal(*sizes)
    found = mr.explain("logsumexp_matmul", a, b)
    assert found.forward == "logsumexp_forward/cuda/simt/float32"
    assert any("too few for planes" in reason for reason in found.reasons)
