"""The kernels of device/simt/jsd_rows.cuh, compiled for the host and run on CPU tensors.

torch computes the matrix products.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from host_simt import built
from torch import Tensor

from monoidreduce._ops.engine import _C, streams


class Call(ctypes.Structure):
    """The struct `Call` of host_cuda/jsd.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("student", "teacher")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "student_pitch", "teacher_pitch")),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("losses", "stats", "factor")),
        *((name, ctypes.c_double) for name in ("inverse", "beta")),
    )


def compiled(folder: Path) -> ctypes.CDLL:
    """The compiled kernels. folder: an own folder for their files."""
    return built('#include "jsd.h"\n', folder)


class Kernels:
    """Stands in for `_C`: the functions that stored_scores.py calls on a GPU.

    `launched` lists the names of the functions called, in order.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.launched: list[str] = []
        self.scaled_in_place: list[int] = []

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(streams, "current", lambda _: 0, raising=False)
        for name in ("score_product", "jsd_rows", "jsd_gradient", "columns_product", "scale_rows"):
            patch.setattr(_C, name, getattr(self, name), raising=False)

    def _call(self, name: str, pair: tuple[Tensor, Tensor], *rest: Any) -> None:
        mask, losses, stats, factor, *numbers = rest
        student, teacher = pair
        assert student.dtype == teacher.dtype == torch.float32
        assert student.stride() == teacher.stride() and student.stride(0) % 8 == 0
        assert stats.is_contiguous() and (losses is None or losses.is_contiguous())
        pointers = [None if t is None else t.data_ptr() for t in (mask, losses, stats, factor)]
        sizes = (*student.shape, student.stride(0), teacher.stride(0))
        stride = 0 if mask is None else mask.stride(0)
        call = Call(
            student.data_ptr(), teacher.data_ptr(), *sizes, pointers[0], stride, *pointers[1:], *numbers
        )
        getattr(self.library, name)(ctypes.byref(call))
        self.launched.append(name)

    def jsd_rows(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None,
        loss: Tensor,
        stats: Tensor,
        factor: Tensor | None,
        inverse: float,
        beta: float,
        *_: int,
    ) -> None:
        self._call("jsd_rows", (student, teacher), mask, loss, stats, factor, inverse, beta)

    def jsd_gradient(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None,
        stats: Tensor,
        factor: Tensor,
        inverse: float,
        beta: float,
        *_: int,
    ) -> None:
        self._call("jsd_gradient", (student, teacher), mask, None, stats, factor, inverse, beta)

    def score_product(self, a: Tensor, b: Tensor, out: Tensor, *_: int) -> None:
        out.copy_(a.float() @ b.float().T)
        self.launched.append("score_product")

    def columns_product(
        self, a: Tensor, b: Tensor, scale: Tensor | None, out: Tensor, order: Tensor | None, *_: int
    ) -> None:
        assert scale is None and order is None
        out.copy_(a.float().T @ b.float())
        self.launched.append("columns_product")

    def scale_rows(self, rows: Tensor, factor: Tensor, out: Tensor, order: Tensor | None, *_: Any) -> None:
        assert factor.is_contiguous() and order is None
        if out.data_ptr() == rows.data_ptr():
            self.scaled_in_place.append(out.data_ptr())
        out.copy_(rows.float() * factor[:, None])
