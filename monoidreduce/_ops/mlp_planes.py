"""The products of an MLP's parts, of float32 matrices in planes of float16 (planes.py).

The first factor of a product is a matrix of the part, or the upstream gradient. It is split for this product
alone, because the scales of the second factor are multiplied into it first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from monoidreduce._ops.memory import aligned
from monoidreduce._ops.mlp_parts import columns_of, rows_of
from monoidreduce._ops.planes import plane_dots, plane_product, scales_of, split_columns, split_rows

__all__ = ["GatedPlaneGradients", "GatedPlaneOutput", "PlaneGradients", "PlaneOutput"]


def _split_units(w2: Tensor) -> Tensor:
    """The columns of w2 [N, K] in planes, a line for each hidden unit."""
    return split_rows(aligned(w2.T))


class PlaneOutput:
    """out = hidden @ w2.T + bias2, as mlp_parts.OutputProduct."""

    def __init__(self, x: Tensor, w1: Tensor, w2: Tensor, bias2: Tensor | None) -> None:
        self.rows, self.columns, self.units, self.bias2 = (
            split_rows(x),
            split_rows(w1),
            _split_units(w2),
            bias2,
        )
        self.factors = scales_of(self.units).contiguous()

    def planes_of(self, rows: slice, units: slice) -> tuple[Tensor, Tensor]:
        return rows_of(self.rows, rows), rows_of(self.columns, units)

    def add(self, out: Tensor, hidden: Tensor, units: slice) -> None:
        """Adds the product of a part to the output of its rows."""
        of_rows = split_rows(hidden, rows_of(self.factors, units))
        plane_product(out, of_rows, rows_of(self.units, units), None, units.start > 0)
        if self.bias2 is not None and units.start == 0:
            out.add_(self.bias2)


class PlaneGradients:
    """The gradients of x, w1 and w2 (those that are needed), as mlp_parts.GradientProducts.

    A kernel alone writes each element of a product, so sums have a fixed order.
    """

    def __init__(self, grad_out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, needed: Sequence[bool]) -> None:
        self.grad_out = grad_out
        self.rows, self.columns = split_rows(x), split_rows(w1)
        self.grad_rows, self.units = split_rows(grad_out), _split_units(w2)
        self.row_factors, self.column_factors = (
            scales_of(planes).contiguous() for planes in (self.rows, self.columns)
        )
        self.dx, self.dw1, self.dw2 = (
            t.new_empty(t.shape) if is_needed else None
            for t, is_needed in zip((x, w1, w2), needed, strict=True)
        )

    def planes_of(self, rows: slice, units: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            rows_of(self.rows, rows),
            rows_of(self.columns, units),
            rows_of(self.grad_rows, rows),
            rows_of(self.units, units),
        )

    def add(self, rows: slice, units: slice, local: Tensor, hidden: Tensor) -> None:
        """Adds the products of a part. local: the gradients of its pre-activations."""
        if self.dx is not None:
            of_rows = split_rows(local, rows_of(self.column_factors, units))
            columns = rows_of(self.columns, units)
            plane_product(rows_of(self.dx, rows), of_rows, columns, None, units.start > 0)
            del of_rows
        if self.dw1 is not None:
            of_units, scales = split_columns(local, rows_of(self.row_factors, rows))
            x = rows_of(self.rows, rows)
            plane_product(rows_of(self.dw1, units), of_units, x, scales, rows.start > 0)
            del of_units
        if self.dw2 is not None:
            hidden = split_rows(hidden)
            factors = scales_of(hidden).contiguous()
            of_outputs, scales = split_columns(rows_of(self.grad_out, rows), factors)
            plane_product(columns_of(self.dw2, units), of_outputs, hidden, scales, rows.start > 0)

    def gradients(self) -> list[Tensor | None]:
        return [self.dx, self.dw1, self.dw2]


class GatedPlaneOutput:
    """The products of a gated MLP's forward pass, as gated_mlp.OutputProducts."""

    def __init__(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        gate: Tensor,
        bias1: Tensor | None,
        gate_bias: Tensor | None,
        bias2: Tensor | None,
    ) -> None:
        self.of_ups = PlaneOutput(x, w1, w2, bias2)
        self.gate, self.bias1, self.gate_bias = split_rows(gate), bias1, gate_bias
        self.units = slice(0, w1.shape[0])

    def write_inputs(self, rows: slice, gates: Tensor, ups: Tensor) -> None:
        x, w1 = self.of_ups.planes_of(rows, self.units)
        plane_dots(gates, x, self.gate, self.gate_bias)
        plane_dots(ups, x, w1, self.bias1)

    def write_output(self, out: Tensor, hidden: Tensor) -> None:
        self.of_ups.add(out, hidden, self.units)


class GatedPlaneGradients:
    """The products of a gated MLP's backward pass, as gated_mlp.GatedGradients."""

    def __init__(
        self,
        grad_out: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        gate: Tensor,
        bias1: Tensor | None,
        gate_bias: Tensor | None,
        needed: Sequence[bool],
    ) -> None:
        self.of_ups = PlaneGradients(grad_out, x, w1, w2, needed[:3])
        self.gate, self.bias1, self.gate_bias = split_rows(gate), bias1, gate_bias
        self.gate_factors = scales_of(self.gate).contiguous()
        self.dgate = gate.new_empty(gate.shape) if needed[3] else None

    def write_inputs(self, rows: slice, units: slice, gates: Tensor, ups: Tensor) -> None:
        x, w1, *_ = self.of_ups.planes_of(rows, units)
        bias1, gate_bias = (
            None if bias is None else rows_of(bias, units) for bias in (self.bias1, self.gate_bias)
        )
        plane_dots(gates, x, rows_of(self.gate, units), gate_bias)
        plane_dots(ups, x, w1, bias1)

    def write_upstream(self, rows: slice, units: slice, hidden: Tensor) -> None:
        *_, grad_out, w2 = self.of_ups.planes_of(rows, units)
        plane_dots(hidden, grad_out, w2, None)

    def add(self, rows: slice, units: slice, gates: Tensor, ups: Tensor, hidden: Tensor) -> None:
        self.of_ups.add(rows, units, ups, hidden)
        if self.of_ups.dx is not None:
            of_rows = split_rows(gates, rows_of(self.gate_factors, units))
            plane_product(rows_of(self.of_ups.dx, rows), of_rows, rows_of(self.gate, units), None, True)
            del of_rows
        if self.dgate is not None:
            of_units, scales = split_columns(gates, rows_of(self.of_ups.row_factors, rows))
            x = rows_of(self.of_ups.rows, rows)
            plane_product(rows_of(self.dgate, units), of_units, x, scales, rows.start > 0)

    def gradients(self) -> list[Tensor | None]:
        return [*self.of_ups.gradients(), self.dgate]
