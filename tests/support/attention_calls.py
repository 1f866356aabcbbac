"""Arguments of attention calls on a GPU, for tests of the tensor-core tiers and of TF32."""

from __future__ import annotations

from typing import Any

import torch
from specimens import Inputs, attention_inputs

# Batch, heads, column heads, rows, columns, width, value width. All but the sizes with one row have so many
# heads that the split-KV kernels for few rows (test_attention_split.py) are not taken.
SIZES: dict[str, tuple[int, ...]] = {
    "one_tile": (1, 68, 68, 128, 128, 64, 64),
    "one_row": (2, 3, 3, 1, 500, 64, 64),
    "one_column": (1, 24, 24, 300, 1, 128, 128),
    "ragged": (2, 18, 18, 201, 333, 128, 128),
    "grouped": (1, 36, 12, 150, 270, 128, 128),
    "one_column_head": (2, 12, 1, 260, 140, 64, 64),
    "narrow": (1, 34, 34, 190, 300, 8, 16),
    "unequal": (1, 34, 34, 190, 300, 104, 56),
    "long": (1, 12, 12, 700, 1300, 128, 128),
    "far_fewer_columns": (2, 18, 6, 900, 200, 128, 128),  # causal: consecutive blocks without any tile
    "many_columns": (1, 12, 12, 700, 4500, 128, 128),
    "wide": (1, 24, 12, 300, 400, 256, 256),
    "wide_one_row": (1, 4, 2, 1, 200, 256, 256),
    "wide_long": (1, 18, 18, 500, 900, 136, 192),
    "wide_payload": (1, 34, 34, 130, 170, 64, 200),
}
# For inputs with NaN and infinities, where the oracle multiplies pairs of rows and columns in float64.
SMALL_SIZES = {"small": (2, 17, 17, 130, 200, 128, 128), "small_wide": (1, 34, 17, 130, 120, 200, 200)}
# The width, the value width or both are no multiple of 8, so that kernels take padded copies.
PADDED_SIZES = {
    "padded_1": (1, 34, 34, 190, 300, 1, 1),
    "padded_7_59": (1, 34, 34, 190, 300, 7, 59),
    "padded_59": (2, 18, 6, 201, 333, 59, 59),
    "padded_100": (1, 36, 12, 150, 270, 100, 100),
    "padded_64_100": (1, 36, 12, 150, 270, 64, 100),
    "padded_250": (1, 24, 12, 300, 400, 250, 250),
    "padded_250_7": (1, 34, 34, 130, 170, 250, 7),
    "padded_one_row": (2, 3, 3, 1, 500, 59, 100),
}
ALL_SIZES = SIZES | SMALL_SIZES | PADDED_SIZES
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 10)},
    "left_window": {"window": (64, None), "causal": True},
    "softcap": {"softcap": 5.0},
    "causal_softcap": {"causal": True, "softcap": 3.0, "scale": 0.3},
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device) -> Inputs:
    return attention_inputs(*ALL_SIZES[size], dtype=dtype, device=device)


def biased_inputs(size: str, kind: str, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    batch, heads, _, rows, columns, *_ = ALL_SIZES[size]
    shapes: dict[str, dict[str, Any]] = {
        "full": {"bias": (batch, heads, rows, columns)},
        "of_rows_and_columns": {"bias": (rows, columns), "bias_dtype": torch.float32},
        "of_heads": {"bias": (heads, rows, columns)},
        "of_columns": {"bias": (batch, 1, 1, columns)},
        "of_columns_in_float": {"bias": (columns,), "bias_dtype": torch.float32},
        "of_rows": {"bias": (heads, rows, 1), "bias_dtype": torch.float32},
        "keep": {"keep": (batch, heads, rows, columns)},
        "keep_rows_and_columns": {"keep": (rows, columns)},
        "keep_columns": {"keep": (batch, 1, 1, columns)},
    }
    return attention_inputs(*ALL_SIZES[size], dtype=dtype, device=gpu, **shapes[kind])
