"""logsumexp_matmul with dlogits that its forward pass saves: the code of `_ops` for Hopper, here without one.

Tensors say that they are on a GPU. Plans are those for an H100, and torch computes what its kernels do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops import dlogits, logsumexp, slices

HOPPER = _C.DeviceFacts(9, 0, multiprocessors=132, cache_bytes=50 << 20, shared_bytes=232448)
ROWS, COLUMNS, WIDTH = 300, 1100, 200
TILE = 2 * 256 * ROWS  # bytes of the dlogits of a tile of columns


class OnGpu(Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Kernels:
    """What replaces `_C` in the code of the operator. computed: the columns whose dlogits were computed."""

    computed = 0

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("plan_")

        def plan(*tensors: Tensor, **options: Any) -> Any:
            def without_memory(value: Any) -> Any:
                return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

            known = {key: without_memory(value) for key, value in options.items()}
            return getattr(_C, name)(*map(without_memory, tensors), **known, gpu=HOPPER)

        return plan

    def logsumexp_forward(
        self,
        a: Tensor,
        b: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        mean: Tensor | None,
        scratch: Tensor,
        kept: Tensor | None,
        row_planes: Tensor | None,
        column_planes: Tensor | None,
        scale: float,
        kept_upstream: float,
        *_: Any,
    ) -> None:
        scores = scale * (a.double() @ b.double().T)
        lse.copy_(scores.logsumexp(1))
        lse_low.copy_(scores.logsumexp(1) - lse)
        assert mean is row_planes is column_planes is None
        if kept is not None:
            kept.copy_(kept_upstream * scores.softmax(1)[:, : kept.shape[1]])

    def logsumexp_local_gradient(
        self,
        a: Tensor,
        b: Tensor,
        grad_lse: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        out: Tensor,
        row_planes: Tensor | None,
        column_planes: Tensor | None,
        scale: float,
        *_: Any,
    ) -> None:
        scores = scale * (a.double() @ b.double().T)
        out.copy_(scale * grad_lse[:, None] * (scores - lse[:, None] - lse_low[:, None]).exp())
        self.computed += len(b)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(logsumexp, "_C", kernels)
    monkeypatch.setattr(logsumexp, "launch_on", lambda on: (1, 0))
    monkeypatch.setattr(slices, "_NARROWEST_TO_SAVE", 0)
    monkeypatch.setattr(slices, "_FEWEST_TERMS_TO_SAVE", 0)
    monkeypatch.setattr(slices, "_BYTES_TO_RECOMPUTE_IN", 0)
    monkeypatch.setattr(dlogits, "leaves_clusters_idle", lambda *_: False)

    def rows_product(
        of: Tensor, columns: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, adds: bool
    ) -> None:
        product = (1 if factor is None else factor[:, None]) * (of.double() @ columns.double())
        out.copy_(out + product if adds else product)

    def columns_product(
        of: Tensor, rows: Tensor, scale: Tensor | None, out: Tensor, order: Tensor | None
    ) -> None:
        out.copy_((1 if scale is None else scale) * (of.double().T @ rows.double()))

    def scale_rows(rows: Tensor, factor: Tensor, out: Tensor, order: Tensor | None) -> Tensor:
        return out.copy_(rows * factor[:, None])

    monkeypatch.setattr(dlogits, "_rows_product", rows_product)
    monkeypatch.setattr(dlogits, "_columns_product", columns_product)
    monkeypatch.setattr(dlogits, "scale_rows", scale_rows)
    return kernels


@pytest.mark.parametrize("needed", ([True, True], [True, False], [False, True]), ids=str)
@pytest.mark.parametrize("tiles", (1, 2, 4, 5))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_of_saved_dlogits(
    dtype: torch.dtype, tiles: int, needed: list[bool], kernels: Kernels
) -> None:
    """Of none, some or all columns; saved ones serve a second pass with another upstream gradient."""
    scale, workspace = 0.5, tiles * TILE
    a, b = (torch.randn(n, WIDTH).to(dtype) for n in (ROWS, COLUMNS))
    b *= 2 * WIDTH**-0.5
    given = [t.as_subclass(OnGpu) for t in (a, b)]
    options = (scale, True, needed[0], workspace)
    results = logsumexp.logsumexp_forward(*given, *options)
    saved = {1: 0, 2: 256, 4: 768, 5: 1104}[tiles]  # a tile is left to compute others in; lines are padded
    assert results[-1].shape == (ROWS, saved)
    wide = [t.double().requires_grad_() for t in (a, b)]
    exact = (scale * (wide[0] @ wide[1].T)).logsumexp(1)
    torch.testing.assert_close(results[0].as_subclass(Tensor).double(), exact.detach(), rtol=1e-6, atol=1e-6)
    for size in (1.0, 1e5):
        kernels.computed, upstream = 0, size * torch.randn(ROWS)
        found = logsumexp.logsumexp_backward(upstream.as_subclass(OnGpu), *given, *results, *options, needed)
        assert kernels.computed == max(COLUMNS - saved, 0)
        expected = torch.autograd.grad(exact, wide, upstream.double(), retain_graph=True)
        for gradient, of, wanted in zip(found, expected, needed, strict=True):
            if wanted:
                assert (gradient.as_subclass(Tensor).double() - of).norm() <= 0.01 * of.norm()
            else:
                assert gradient.numel() == 0
