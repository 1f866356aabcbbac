"""Registration of the ops of folds. One op serves all user functions or monoids, which it takes as text.

`import monoidreduce` registers them, because exported or ahead-of-time compiled programs look ops up by name.
Their implementations are imported at the first call, since they load more modules than all other operators
together.
"""

from __future__ import annotations

from typing import Any

from monoidreduce._ops.registry import UNROUNDED, Fold, register


def _statistics() -> Any:
    # With the first call: see above.
    from monoidreduce.folds import statistics_op

    return statistics_op


def _second_derivatives() -> Any:
    # With the first call: see above.
    from monoidreduce.folds import second_derivatives

    return second_derivatives


def _modified_attention() -> Any:
    # With the first call: see above.
    from monoidreduce.folds import modified_attention_op

    return modified_attention_op


def _cpp_monoid() -> Any:
    # With the first call: see above.
    from monoidreduce.folds import cpp_monoid_op

    return cpp_monoid_op


register(
    "statistics",
    inputs="Tensor a, Tensor b, Tensor? other_a, Tensor? other_b, Tensor? row, Tensor? column, "
    "Tensor? payload, Tensor? table, Tensor? row_index, Tensor? column_index, Tensor? table_index",
    options="str program, SymInt[] widths, SymInt batches, SymInt[] sizes, float scale, int? workspace",
    outputs="values, sums, low, indices",
    differentiable="values, sums",
    residuals="values, sums, low, indices",
    constants="row_index, column_index, table_index",
    forward=lambda *args: _statistics().forward(*args),
    fake=lambda *args: _statistics().results(*args),
    backward=lambda *args: _statistics().backward(*args),
    second=lambda *args, **moved: _second_derivatives().gradients_of_gradients(*args, **moved),
    tangents=lambda *args: _second_derivatives().tangents(*args),
    obstacle=lambda *args: _second_derivatives().obstacle(args[:11], args[11]),
    fold=Fold(
        a="a",
        b="b",
        other_a="other_a",
        other_b="other_b",
        payload="payload",
        sums="sums",
        data=("row", "column"),
    ),
    backward_options=UNROUNDED,
    compiles=True,
)

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
    forward=lambda *args: _modified_attention().forward(*args),
    fake=lambda *args: _modified_attention().results(*args),
    backward=lambda *args: _modified_attention().backward(*args),
    fold=Fold(a="q", b="k", payload="v", joined=("sinks",)),
    compiles=True,
)

register(
    "cpp_monoid",
    inputs="Tensor a, Tensor b, Tensor? other_a, Tensor? other_b, Tensor? label",
    options="str monoid, float scale, int? workspace",
    outputs="values, kept, indices",
    differentiable="values",
    residuals="values, kept, indices",
    constants="label",
    forward=lambda *args: _cpp_monoid().forward(*args),
    fake=lambda *args: _cpp_monoid().results(*args),
    backward=lambda *args: _cpp_monoid().backward(*args),
    fold=Fold(a="a", b="b", other_a="other_a", other_b="other_b"),
    backward_options=UNROUNDED,
    compiles=True,
)
