"""Products of a wide MLP's parts in planes of float16, with kernels of torch in place of a GPU's."""

from __future__ import annotations

import pytest
import torch
from plane_kernels import numbers, replace_plane_kernels
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce._ops import gated_mlp, mlp_planes
from monoidreduce._ops.mlp_parts import HiddenPart, multiply_hidden, multiply_hidden_gradients
from monoidreduce._ops.mlp_planes import PlaneGradients, PlaneOutput

ROWS, WIDTH, UNITS, OUTPUTS = 300, 136, 520, 200
PARTS = ((300, 520), (300, 256), (256, 520), (256, 256))  # rows and hidden units at a time


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return replace_plane_kernels(monkeypatch)


class Given:
    """Operands whose rows differ in size, and what is to be found for the activation "sigmoid"."""

    def __init__(self) -> None:
        torch.manual_seed(0)

        def drawn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 1, (rows, 1)).float())

        self.x, self.w1, self.w2 = drawn(ROWS, WIDTH), drawn(UNITS, WIDTH) / 8, drawn(OUTPUTS, UNITS)
        self.bias1, self.bias2, self.grad_out = torch.randn(UNITS), torch.randn(OUTPUTS), drawn(ROWS, OUTPUTS)
        leaves = [t.double().requires_grad_() for t in (self.x, self.w1, self.w2, self.bias1)]
        x, w1, w2, bias1 = leaves
        out = (x @ w1.T + bias1).sigmoid() @ w2.T + self.bias2
        self.gradients = torch.autograd.grad(out, leaves, self.grad_out.double())
        self.out = out.detach()

    def hidden(self, row_planes: Tensor, column_planes: Tensor, bias1: Tensor) -> Tensor:
        """As a kernel computes them, from planes alone."""
        return (numbers(row_planes, WIDTH) @ numbers(column_planes, WIDTH).T + bias1).sigmoid()

    def store(self, part: HiddenPart) -> None:
        planes = (part.row_planes, part.column_planes, part.other_row_planes, part.other_column_planes)
        x, w1, grad_out, w2 = (t for t in planes if t is not None)
        assert part.bias1 is not None and part.sums is not None
        assert len(x) == len(part.x) and len(w1) == len(part.w1) == part.w2.shape[1]
        values = self.hidden(x, w1, part.bias1)
        local = numbers(grad_out, OUTPUTS) @ numbers(w2, OUTPUTS).T * values * (1 - values)
        part.hidden.copy_(values), part.out.copy_(local)
        part.sums.zero_()
        part.sums[0, : local.shape[1]] = local.sum(0)


def assert_close(found: Tensor | None, exact: Tensor) -> None:
    assert found is not None and found.dtype == torch.float32
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_the_output(part: tuple[int, int], biased: bool) -> None:
    given = Given()
    product = PlaneOutput(given.x, given.w1, given.w2, given.bias2 if biased else None)

    def store(x: Tensor, w1: Tensor, bias1: Tensor | None, hidden: Tensor, *planes: Tensor | None) -> None:
        row_planes, column_planes = planes
        assert row_planes is not None and column_planes is not None and bias1 is not None
        assert len(x) == len(row_planes) and len(w1) == len(column_planes) == len(bias1)
        hidden.copy_(given.hidden(row_planes, column_planes, bias1))

    out = torch.empty(ROWS, OUTPUTS)
    multiply_hidden(store, part, given.x, given.w1, given.bias1, product, out)
    assert_close(out, given.out if biased else given.out - given.bias2)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("wanted", ((True, True, True), (True, False, False), (False, True, True)), ids=str)
def test_gradients(wanted: tuple[bool, bool, bool], part: tuple[int, int], kernels: list[int]) -> None:
    """Those of weights are products of transposed matrices."""
    given = Given()
    operands = given.grad_out, given.x, given.w1, given.w2
    products = PlaneGradients(*operands, wanted)
    found = multiply_hidden_gradients(given.store, part, *operands, given.bias1, products, True)
    for of, exact, is_wanted in zip(found, given.gradients, (*wanted, True), strict=True):
        assert (of is not None) == is_wanted
        if is_wanted:
            assert_close(of, exact)
    units = [n for n in ([256, 256, 8] if part[1] == 256 else [520]) for _ in range(-(-ROWS // part[0]))]
    assert kernels == [rows for n in units for rows in (n, OUTPUTS)] * wanted[1]


@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize(
    ("workspace", "parts", "backward"),
    ((0, [128, 128, 44], "units"), (0, [128, 128, 44], "rows"), (1 << 30, [300], "units")),
    ids=("units", "rows", "at_once"),
)
def test_a_gate(
    workspace: int,
    parts: list[int],
    backward: str,
    biased: bool,
    kernels: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts of rows forward, of rows or of hidden units backward, or at once."""
    monkeypatch.setattr(gated_mlp, "_in_planes", lambda *_: True)
    if backward == "rows":
        monkeypatch.setattr(gated_mlp, "backward_part", lambda *_: (128, UNITS))
    given = Given()
    inputs = {"x": given.x, "w1": given.w1, "w2": given.w2, "gate": given.w1.flip(0)}
    if biased:
        inputs |= {"bias1": given.bias1, "gate_bias": given.bias1.flip(0), "bias2": given.bias2}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    in_double = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    rows: list[int] = []
    split = mlp_planes.split_rows

    def of_rows(x: Tensor, by: Tensor | None = None) -> Tensor:
        if by is not None:  # hidden values
            rows.append(len(x))
        return split(x, by)

    with monkeypatch.context() as patch, mr.workspace(workspace):
        patch.setattr(mlp_planes, "split_rows", of_rows)
        out = mr.mlp(**leaves, activation="silu")
        assert rows == parts
    with mr.workspace(workspace):
        found = torch.autograd.grad(out, list(leaves.values()), given.grad_out)
    exact = reference.mlp(**in_double, activation="silu")
    gradients = torch.autograd.grad(exact, list(in_double.values()), given.grad_out.double())
    assert_close(out.detach(), exact.detach())
    for of, expected in zip(found, gradients, strict=True):
        assert_close(of, expected)
    times = 1 if workspace else len(parts) if backward == "rows" else -(-UNITS // 128)
    assert len(kernels) == 3 * times  # products of dw1, dw2 and dgate
