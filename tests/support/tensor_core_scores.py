"""Scores of `Statistics.reference` as tensor cores compute them, for results that show the difference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops.products import ELEMENTS_OF_A_WHOLE_GPU
from monoidreduce.folds.torch import reader

SCORES = reader.scores


def tensor_core_scores(rows: Tensor, columns: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """As torch's products of 16-bit operands, not rounded. Tensor cores cut off bits of float32 sums. Each
    score is too small by up to an ulp or two, in magnitude, and totals of thousands show it. The local
    gradients, operands of the backward products, are rounded: where a row's are all equal, so are the errors.
    """
    exact = SCORES(rows, columns, dtype, 1.0)
    if exact.requires_grad:
        exact.register_hook(lambda local: local.to(rows.dtype).to(dtype))
    with torch.no_grad():
        # Small products cuBLAS may compute in parts of the width, whose sums cut off fewer bits.
        more = -(-ELEMENTS_OF_A_WHOLE_GPU // max(len(columns), 1)) - len(rows)
        many = F.pad(rows, (0, 0, 0, max(more, 0)))
        products = torch.mm(many, columns.T, out_dtype=torch.float32)[: len(rows)]
    return (exact + (products - exact).detach()) * scale
