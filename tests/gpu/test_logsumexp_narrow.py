"""A narrow logsumexp_matmul on tensor cores: its gradients are folds, and no local gradients are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES, assert_same_bits, check_captured, peak, reset_peak
from paths import takes
from specimens import Inputs, integers, name_of, normal
from tolerance import check_operator
from torch._subclasses import FakeTensorMode

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")

# Rows, columns, width.
SIZES = {
    "one_of_each": (1, 1, 8),
    "one_row": (1, 2048, 64),
    "one_column": (2048, 1, 64),
    "tiles": (384, 512, 64),
    "wide_tiles": (256, 384, 128),
    "ragged": (513, 1111, 64),
    "ragged_wide": (1111, 513, 104),
    "odd_width": (700, 333, 59),
    "wide_odd_width": (333, 700, 99),
    "many": (4097, 4100, 64),
    "many_wide": (4100, 4097, 128),
}
LARGE = "ragged"


def inputs_of(size: str, dtype: torch.dtype, gpu: torch.device, draw: Any = normal) -> Inputs:
    rows, columns, width = SIZES[size]
    a, b = (draw(n, width, dtype=dtype, device=gpu) for n in (rows, columns))
    return {"a": a, "b": b if draw is integers else b * width**-0.5}


def paths(tier: str | None, dtype: torch.dtype, mode: str = "") -> set[str]:
    of = f"cuda/{tier}{{}}/{name_of(dtype)}"
    return {"logsumexp_forward/" + of.format(""), "logsumexp_backward/" + of.format(mode)}


def is_narrow(inputs: Inputs, *names: str) -> bool:
    leaves = [t.detach().requires_grad_(name in names) for name, t in inputs.items()]
    text = str(mr.explain("logsumexp_matmul", *leaves))
    return "narrow: gradients are folds" in text


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("scale", (1.0, 0.3, 6.0))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, scale: float, dtype: torch.dtype, tier: str, gpu: torch.device) -> None:
    inputs = inputs_of(size, dtype, gpu)
    assert is_narrow(inputs)
    with takes(paths(tier, dtype)):
        check_operator("logsumexp_matmul", inputs, {"scale": scale})


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("names", (["a"], ["b"], ["a", "b"]), ids=str)
@pytest.mark.parametrize("size", ("ragged", "wide_odd_width", "many"))
def test_gradients_that_are_wanted(
    size: str, names: list[str], dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    inputs = inputs_of(size, dtype, gpu)
    assert is_narrow(inputs, *names)
    with takes(paths(tier, dtype)):
        check_operator("logsumexp_matmul", inputs, differentiate=names)


@pytest.mark.parametrize("rows, columns", ((100, 4500), (4500, 100)))
def test_few_beside_many_are_products(rows: int, columns: int, tier: str, gpu: torch.device) -> None:
    inputs = {
        "a": normal(rows, 64, dtype=torch.bfloat16, device=gpu),
        "b": normal(columns, 64, dtype=torch.bfloat16, device=gpu) / 8,
    }
    assert not is_narrow(inputs)
    with takes(paths(tier, torch.bfloat16)):
        check_operator("logsumexp_matmul", inputs)


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
def test_upstream_gradients(layout: str, gpu: torch.device) -> None:
    check_operator("logsumexp_matmul", inputs_of(LARGE, torch.float16, gpu), upstream=layout)


def test_layouts(tier: str, gpu: torch.device) -> None:
    """Lines that lie apart are read in place; transposed and odd ones are copied."""
    inputs = inputs_of(LARGE, torch.bfloat16, gpu)
    expected = mr.logsumexp_matmul(*inputs.values())
    for pad in (8, 3):
        apart = {name: torch.nn.functional.pad(t, (0, pad))[:, :-pad] for name, t in inputs.items()}
        with takes(paths(tier, torch.bfloat16)):
            check_operator("logsumexp_matmul", apart)
        assert torch.equal(mr.logsumexp_matmul(*apart.values()), expected)
    transposed = {name: t.T.contiguous().T for name, t in inputs.items()}
    check_operator("logsumexp_matmul", transposed)
    copied = {reason.split()[0] for reason in mr.explain("logsumexp_matmul", *transposed.values()).reasons}
    assert {"a", "b"} <= copied


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("size", ("ragged", "wide_tiles"))
def test_sums_of_integers(size: str, dtype: torch.dtype, gpu: torch.device) -> None:
    """Scores far apart and equal ones, whose shares are exact."""
    inputs = inputs_of(size, dtype, gpu, integers)
    check_operator("logsumexp_matmul", inputs, {"scale": 4.0})


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_one_column_of_integers(dtype: torch.dtype, gpu: torch.device) -> None:
    """torch's log-sum-exp is the score then, exactly. On tensor cores scores are in units of log 2, and 48 is
    rounded to 47.999996: two roundings are allowed, as in test_one_hot_softmax_is_exact."""
    inputs = inputs_of("one_column", dtype, gpu, integers)
    scores = 4.0 * (inputs["a"].double() @ inputs["b"].double().mT)[:, 0]
    assert scores.abs().max() >= 16
    lse = mr.logsumexp_matmul(inputs["a"].requires_grad_(), inputs["b"], scale=4.0).detach()
    torch.testing.assert_close(lse.double(), scores, rtol=2 * torch.finfo(lse.dtype).eps, atol=0)


@pytest.mark.parametrize("spread", (30.0, 1000.0, 1e6))
def test_large_scores(spread: float, gpu: torch.device) -> None:
    """Those beyond 2^22 are rounded before a maximum or a log-sum-exp is taken from them."""
    inputs = inputs_of(LARGE, torch.bfloat16, gpu)
    check_operator("logsumexp_matmul", inputs, {"scale": spread})


@pytest.mark.parametrize("scale", (1e3, 1e5, 1e7))
def test_shares_of_large_scores(scale: float, gpu: torch.device) -> None:
    """Where one score of a row is the largest by far its share is 1, to the last bit of 16."""
    a, b = (normal(n, 64, dtype=torch.bfloat16, device=gpu) for n in (700, 64))
    b = torch.eye(64, dtype=torch.bfloat16, device=gpu)
    a[torch.arange(700), torch.arange(700) % 64] += 8
    grad = torch.randn(700, device=gpu)
    leaves = a.requires_grad_(), b.requires_grad_()
    found = torch.autograd.grad(mr.logsumexp_matmul(*leaves, scale=scale), leaves, grad)
    shares = (a @ b.mT).argmax(1)[:, None] == torch.arange(64, device=gpu)
    local = (grad * scale)[:, None].double() * shares
    for got, expected in zip(found, (local @ b.double(), local.mT @ a.double()), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=8e-3, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("place", ("a", "b"))
@pytest.mark.parametrize("size", ("ragged", "wide_odd_width"))
def test_non_finite_inputs(size: str, place: str, value: float, gpu: torch.device) -> None:
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs[place][150, 7] = value
    found = check_operator("logsumexp_matmul", inputs)
    assert not found[f"d_{place}"].isfinite().all()


@pytest.mark.parametrize("size", ("ragged", "many"))
def test_an_infinite_column_meets_no_row_beyond_the_last(size: str, gpu: torch.device) -> None:
    """Its shares are 0; so is its gradient, though its product with zeros is NaN."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs["a"][:, 3] = 1.0
    inputs["b"][100, 3] = -torch.inf
    found = check_operator("logsumexp_matmul", inputs, differentiate=["b"])
    assert (found["d_b"][100] == 0).all() and found["d_b"].isfinite().all()


def test_same_bits_in_every_run(tier: str, gpu: torch.device) -> None:
    """In either mode, whose paths alone differ."""
    inputs = {name: t.requires_grad_() for name, t in inputs_of("many", torch.bfloat16, gpu).items()}
    grad = torch.randn(len(inputs["a"]), device=gpu)

    def step() -> dict[str, torch.Tensor]:
        lse = mr.logsumexp_matmul(**inputs)
        gradients = torch.autograd.grad(lse, list(inputs.values()), grad)
        return {"lse": lse.detach(), **dict(zip(inputs, gradients, strict=True))}

    first = step()
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)
        try:
            for _ in range(10):
                with takes(paths(tier, torch.bfloat16, "/deterministic" if asked else "")):
                    assert_same_bits(step(), first)
        finally:
            torch.use_deterministic_algorithms(False)


def test_capture(gpu: torch.device) -> None:
    inputs = [t.requires_grad_() for t in inputs_of(LARGE, torch.bfloat16, gpu).values()]
    grad = torch.randn(len(inputs[0]), device=gpu)

    def step() -> tuple[torch.Tensor, ...]:
        lse = mr.logsumexp_matmul(*inputs)
        return lse.detach(), *torch.autograd.grad(lse, inputs, grad)

    check_captured(step)


def test_memory(gpu: torch.device) -> None:
    """The mean of b, and of each row four numbers; not a byte a score."""
    rows, columns, width = 8192, 6144, 64
    a, b = (normal(n, width, dtype=torch.bfloat16, device=gpu).requires_grad_() for n in (rows, columns))

    def step() -> None:
        torch.autograd.grad(mr.logsumexp_matmul(a, b).sum(), (a, b))

    step()
    before = reset_peak()
    step()
    gradients, kept, numbers = 2 * width * (rows + columns), 2 * rows * width, 4 * rows * 6
    assert peak() - before <= gradients + kept + numbers + (1 << 20) < 2 * rows * columns / 8


@pytest.mark.parametrize("differentiated", (False, True))
@pytest.mark.parametrize(
    "rows, columns, width", ((100, 300, 59), (4096, 4096, 64), (100, 4500, 64), (0, 9, 8))
)
def test_what_is_traced_has_the_shapes_of_what_runs(
    rows: int, columns: int, width: int, differentiated: bool, gpu: torch.device
) -> None:
    op = torch.ops.monoidreduce.logsumexp_matmul.default
    a, b = (torch.randn(n, width, dtype=torch.bfloat16, device=gpu) for n in (rows, columns))
    found = op(a, b, 0.5, True, differentiated, 1 << 30)
    with FakeTensorMode() as mode:
        traced = op(mode.from_tensor(a), mode.from_tensor(b), 0.5, True, differentiated, 1 << 30)
    assert [t.shape for t in traced] == [t.shape for t in found]


def test_a_plan_says_what_is_kept(gpu: torch.device) -> None:
    a, b = (torch.randn(n, 64, dtype=torch.bfloat16, device=gpu) for n in (300, 200))
    lse, low = torch.empty(2, 300, device=gpu)
    stream = torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="mean: expected a tensor, as the plan says, got none"):
        plan = mr._C.plan_logsumexp_forward(a, b, mean=a)
        mr._C.logsumexp_forward(a, b, lse, low, *[None] * 5, 1.0, 1.0, 0, 1, stream, plan)
    plan = mr._C.plan_logsumexp_backward(a, b, mean=a, da=a, db=b)
    scratch, gradients = torch.empty(plan.scratch, device=gpu), (torch.empty_like(a), torch.empty_like(b))
    call = (a, b, lse, lse, low, None, *gradients, scratch, 1.0, 0, 1, stream, plan)
    with pytest.raises(ValueError, match="mean: expected a tensor beside da, got none"):
        mr._C.logsumexp_backward(*call)
