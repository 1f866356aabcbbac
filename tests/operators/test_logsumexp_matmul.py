"""logsumexp_matmul: the scalar fold, against the rule of tolerance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from specimens import DTYPES, integers, logsumexp_inputs, name_of, normal
from tolerance import check_operator

import monoidreduce as mr

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 129, 257)
COLUMNS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 513, 1031)
WIDTHS = (0, 1, 2, 3, 8, 16, 17, 33, 64, 65, 131)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", (33, 300))
def test_number_of_rows(rows: int, columns: int, device: torch.device) -> None:
    check_operator("logsumexp_matmul", logsumexp_inputs(rows, columns, dtype=torch.float32, device=device))


@pytest.mark.isa
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", (5, 65))
def test_number_of_columns(rows: int, columns: int, device: torch.device) -> None:
    draw: Any = integers if columns == 1 else normal
    inputs = logsumexp_inputs(rows, columns, dtype=torch.float32, device=device, draw=draw)
    results = check_operator("logsumexp_matmul", inputs, exact=columns == 1)
    if columns == 0:
        assert (results["out0"] == -math.inf).all() and (results["d_a"] == 0).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_width(width: int, device: torch.device) -> None:
    check_operator(
        "logsumexp_matmul",
        logsumexp_inputs(34, 45, width, dtype=torch.float32, device=device),
        {"scale": 0.3},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("scale", (0.0, -0.7, 0.125, 1.0, 2.5))
def test_scale(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    check_operator("logsumexp_matmul", logsumexp_inputs(dtype=dtype, device=device), {"scale": scale})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
def test_accuracy(dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to every gradient, in float32 too."""
    inputs = logsumexp_inputs(400, 513, 64, dtype=dtype, device=device)
    check_operator("logsumexp_matmul", inputs, {"scale": 2.0})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("rows, columns, width", ((1, 513, 64), (130, 257, 65), (256, 1031, 32)))
def test_sizes_in_every_dtype(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_operator(
        "logsumexp_matmul", logsumexp_inputs(rows, columns, width, dtype=dtype, device=device), {"scale": 2.0}
    )


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    check_operator("logsumexp_matmul", logsumexp_inputs((3, 14), dtype=dtype, device=device), upstream=layout)


@pytest.mark.parametrize("shape", ((6,), (2, 3), (2, 1, 5), (0, 3)), ids=str)
def test_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = logsumexp_inputs(shape, dtype=torch.float64, device=device)
    assert check_operator("logsumexp_matmul", inputs)["out0"].shape == shape


@pytest.mark.parametrize("names", ((), ("a",), ("b",), ("a", "b")), ids=str)
def test_every_subset_of_gradients(names: tuple[str, ...], device: torch.device) -> None:
    inputs = logsumexp_inputs(dtype=torch.float32, device=device)
    check_operator("logsumexp_matmul", inputs, differentiate=names)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    assert mr.logsumexp_matmul(**leaves).requires_grad == bool(names)


def test_columns_twice_add_log_two(device: torch.device) -> None:
    inputs = logsumexp_inputs(65, 300, dtype=torch.float64, device=device)
    once = mr.logsumexp_matmul(**inputs)
    twice = mr.logsumexp_matmul(inputs["a"], torch.cat((inputs["b"], inputs["b"])))
    torch.testing.assert_close(twice, once + math.log(2.0), rtol=1e-13, atol=1e-13)


def test_matches_torch(device: torch.device) -> None:
    inputs = logsumexp_inputs(dtype=torch.float64, device=device)
    expected = torch.logsumexp(0.3 * inputs["a"] @ inputs["b"].mT, -1)
    torch.testing.assert_close(mr.logsumexp_matmul(**inputs, scale=0.3), expected, rtol=1e-12, atol=1e-13)
