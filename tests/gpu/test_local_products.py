"""Products of local gradients on Hopper against float64: tails, rows left out, weights stored transposed."""

import pytest
import torch
from calls import HALVES
from specimens import name_of
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops import dlogits
from monoidreduce._ops.products import SUMS_IN_FLOAT32, write_product
from monoidreduce._ops.slices import Needed

pytestmark = pytest.mark.tiers("sm90")

SIZES = [  # rows, columns, width, rows that count
    (300, 520, 264, 300),
    (1000, 777, 512, 640),
    (1000, 1, 72, 3),
    (129, 300, 2304, 0),
    (2048, 512, 192, 1999),
]


def _problem(
    rows: int, columns: int, counted: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Local gradients in whole tiles of columns, as the workspace has them, and an order of their rows."""
    local = torch.zeros(rows, -(-columns // 256) * 256, dtype=dtype, device=device)
    local[:counted, :columns] = torch.randn(counted, columns, device=device)
    order = torch.cat([torch.randperm(rows, device=device), torch.tensor([counted], device=device)])
    return local[:, :columns], order


def _close(actual: Tensor, expected: Tensor, by: float) -> None:
    assert actual.isfinite().all()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=by, atol=by * largest)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows, columns, width, counted", SIZES)
def test_rows_product(
    rows: int,
    columns: int,
    width: int,
    counted: int,
    transposed: bool,
    dtype: torch.dtype,
    gpu: torch.device,
) -> None:
    local, order = _problem(rows, columns, counted, dtype, gpu)
    whole = -(-columns // 8) * 8 if transposed else columns
    weight = (
        torch.randn(width, whole, device=gpu).to(dtype).T
        if transposed
        else torch.randn(whole, width, device=gpu).to(dtype)
    )
    weight = weight[:columns]
    factor = torch.randn(rows, device=gpu)
    factor[::5] = 0
    product = factor[:, None].double() * (local.double() @ weight.double())

    # Of rows that are not active it is not said what they get.
    sums = torch.randn(rows, width, device=gpu)
    expected = sums.double() + product
    dlogits._rows_product(local, weight, factor, sums, order, True)
    _close(sums[:counted], expected[:counted], 1e-5)
    expected = sums.double() + local.double() @ weight.double()
    dlogits._rows_product(local, weight, None, sums, order, True)
    _close(sums[:counted], expected[:counted], 1e-5)

    places = order[:counted]
    others = torch.ones(rows, dtype=torch.bool, device=gpu)
    others[places] = False
    for of_result, error in ((dtype, float(torch.finfo(dtype).eps)), (torch.float32, 1e-5)):
        out = torch.full((rows, width), 7.0, dtype=of_result, device=gpu)
        dlogits._rows_product(local, weight, factor, out, order, False)
        _close(out[places], product[:counted], error)
        assert (out[others] == 0).all()


@pytest.mark.skipif(not SUMS_IN_FLOAT32, reason="torch before 2.8")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("unrounded", (False, True))
@pytest.mark.parametrize("uniform", (False, True))
@pytest.mark.parametrize("counted", (0, 200, 256))
def test_rows_that_torch_multiplies(
    counted: int, uniform: bool, unrounded: bool, dtype: torch.dtype, gpu: torch.device
) -> None:
    """All dlogits were saved. Those of rows that are not active hold NaN."""
    local, order = _problem(256, 2048, counted, dtype, gpu)
    local[counted:] = torch.nan
    x, weight = (torch.randn(n, 512, device=gpu).to(dtype) for n in (256, 2048))
    grad = torch.full((1,), -3.0, device=gpu).expand(256) if uniform else torch.randn(256, device=gpu)
    unit = dlogits.unit_of(2.0)
    upstream = (
        dlogits.UniformUpstream(unit * grad, unit * grad[:1]) if uniform else dlogits.Upstream(grad, unit)
    )
    head = dlogits.Head(
        x,
        weight,
        Needed(True, False),
        clusters=66,
        own_columns=256,
        saved=local,
        order=order,
        upstream=upstream,
        unrounded=unrounded,
    )
    assert head.rows_by_torch
    ((found, _, _),) = dlogits.multiply_dlogits([head], lambda *_: None)
    assert found is not None and found.dtype == (torch.float32 if unrounded else dtype)
    places, expected = order[:counted], torch.zeros(256, 512, dtype=torch.float64, device=gpu)
    factor = grad[places, None].double() * 2 / dlogits.UNIT_UPSTREAM
    expected[places] = factor * (local[:counted].double() @ weight.double())
    _close(found, expected, 1e-5 if unrounded else float(torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("rows, columns, width, counted", SIZES)
def test_columns_product(
    rows: int, columns: int, width: int, counted: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    local, order = _problem(rows, columns, counted, dtype, gpu)
    x = torch.randn(rows, width + 8, device=gpu).to(dtype)[:, :width]
    x[counted + 64 :] = torch.nan  # is not read
    expected = local[:counted].double().T @ x[:counted].double()
    x[counted : counted + 64] = 1
    out = torch.full((columns, width), torch.nan, dtype=dtype, device=gpu)
    for scale in (None, torch.tensor([0.375], device=gpu)):
        dlogits._columns_product(local, x, scale, out, order)
        _close(out, expected * (1 if scale is None else 0.375), float(torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("rows, columns, width, counted", SIZES)
def test_columns_product_adds_to_float32(
    rows: int, columns: int, width: int, counted: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    local, order = _problem(rows, columns, counted, dtype, gpu)
    x = torch.randn(rows, width, device=gpu).to(dtype)
    x[counted : counted + 64] = 1
    x[counted + 64 :] = torch.nan  # is not read
    sums = torch.randn(columns, width, device=gpu)
    expected = sums.double()
    for scale in (None, torch.tensor([0.375], device=gpu)):
        product = local[:counted].double().T @ x[:counted].double()
        expected += product * (1 if scale is None else 0.375)
        dlogits._columns_product(local, x, scale, sums, order)
        _close(sums, expected, 1e-5)


def test_all_rows_count_without_an_order(gpu: torch.device) -> None:
    local, _ = _problem(500, 300, 500, torch.bfloat16, gpu)
    weight, x = (torch.randn(n, 128, device=gpu).bfloat16() for n in (300, 500))
    sums, out = torch.zeros(500, 128, device=gpu), torch.empty_like(weight)
    dlogits._rows_product(local, weight, None, sums, None, True)
    dlogits._columns_product(local, x, None, out, None)
    _close(sums, local.double() @ weight.double(), 1e-5)
    _close(out, local.double().T @ x.double(), float(torch.finfo(torch.bfloat16).eps))


def test_products_on_another_tier_raise(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "sm80")
    local, order = _problem(64, 256, 64, torch.bfloat16, gpu)
    with pytest.raises(ValueError, match="a: expected a product on the tier sm90, got one on another"):
        _C.columns_product(local, local, None, local.new_empty(256, 256), order, 1, 0)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(
    "rows, columns, terms", ((128, 256, 8192), (64, 64, 65536), (248, 264, 25345), (1000, 512, 1024))
)
def test_small_products_are_rounded_once(
    rows: int, columns: int, terms: int, biased: bool, dtype: torch.dtype, gpu: torch.device
) -> None:
    """cuBLAS divides such long sums among blocks.

    If it added their parts in 16 bits, the error would be larger than that of rounding the exact sum once.
    """
    a, b = torch.randn(rows, terms, device=gpu).to(dtype), torch.randn(columns, terms, device=gpu).to(dtype).T
    bias = torch.randn(columns, device=gpu).to(dtype) if biased else None
    exact = a.double() @ b.double() + (bias.double() if bias is not None else 0)
    out = torch.full((rows, columns), torch.nan, dtype=dtype, device=gpu)
    write_product(out, a, b, bias)
    once = (exact.to(dtype).double() - exact).norm()
    assert (out.double() - exact).norm() <= 1.02 * once
