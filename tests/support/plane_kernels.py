"""Kernels of torch in place of those of csrc/cuda/planes/products.cu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, streams


def in_planes(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """The high and the low plane of x, and their scales, of the largest numbers along an axis."""
    largest = x.abs().amax(axis, keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(largest.log2().floor() - 13), 1)
    high = (x / scale).half()
    return high, (x / scale - high.float()).half(), scale


def whole(planes: Tensor, width: int) -> Tensor:
    """The sum of both planes, which lie behind each other."""
    plane = -(-width // 64) * 64
    return planes[:, :width].double() + planes[:, plane : plane + width].double()


def numbers(planes: Tensor, width: int) -> Tensor:
    """What split_rows was given."""
    return whole(planes, width) * planes.view(torch.float32)[:, -4:-3]


def replace_plane_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes `_C` compute what these kernels do. Lists the rows of each product of a transposed matrix."""
    of_columns: list[int] = []

    def split(x: Tensor, by: Tensor | None, out: Tensor, *_: Any) -> None:
        high, low, scale = in_planes(x if by is None else x * by, 1)
        plane, width = (out.shape[1] - 8) // 2, x.shape[1]
        out[:, : 2 * plane] = 0
        out[:, :width], out[:, plane : plane + width] = high, low
        out.view(torch.float32)[:, -4] = scale[:, 0]

    def split_columns(x: Tensor, by: Tensor, largest: Tensor, out: Tensor, scales: Tensor, *_: Any) -> None:
        assert by.is_contiguous() and not largest.any()
        high, low, scale = in_planes(x * by[:, None], 0)
        plane, width = out.shape[1] // 2, x.shape[1]
        out.zero_()
        out[:, :width], out[:, plane : plane + width] = high, low
        scales.copy_(scale[0])

    def product(a: Tensor, b: Tensor, scales: Tensor | None, out: Tensor, adds: bool, *_: Any) -> None:
        (rows, columns), terms = out.shape, len(b)
        if scales is None:
            left = numbers(a, terms)
        else:
            of_columns.append(rows)
            left = whole(a, rows).T * scales[:, None]
        found = left @ whole(b, columns)
        out.copy_(out + found if adds else found)

    def dots(a: Tensor, b: Tensor, out: Tensor, *_: Any) -> None:
        width = (a.shape[1] - 8) // 2
        out.copy_(numbers(a, width) @ numbers(b, width).T)

    kernels = {
        "split_rows": split,
        "split_columns": split_columns,
        "plane_product": product,
        "plane_dots": dots,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(_C, name, kernel, raising=False)
    monkeypatch.setattr(streams, "current", lambda _: 0, raising=False)
    return of_columns
