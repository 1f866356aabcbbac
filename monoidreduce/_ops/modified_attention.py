"""Attention with a user's scores: one op for all functions, which carries them as a program.

What programs are is imported with the first call.
"""

from __future__ import annotations

from monoidreduce._ops.registry import register
from monoidreduce._ops.statistics import in_module

_in_passes = in_module("monoidreduce.folds.modified_attention_op")

register(
    "modified_attention",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? sinks, Tensor? table_index, Tensor? blocks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k",
    options="str program, SymInt[] sizes, float? scale, SymInt left, SymInt right, SymInt block_rows, "
    "SymInt block_columns, bool weights, bool compensated",
    outputs="out, lse, lse_low, out_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low, out_low",
    constants="table_index, blocks, cu_seqlens_q, cu_seqlens_k",
    forward=_in_passes("forward"),
    fake=_in_passes("results"),
    backward=_in_passes("backward"),
)
