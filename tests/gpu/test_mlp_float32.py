"""Float32 MLPs in planes of float16 (`mr.float32("emulated")`), beside torch in float32 and float64.

Those with a width over 128 run in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import (
    assert_same_bits,
    check_captured,
    peak,
    reset_peak,
    results,
    scaled_mlp_inputs,
    upstreams,
)
from mlp_calls import check, many_rows
from paths import takes
from specimens import LAYOUTS, Inputs, Specimen, mlp_inputs
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce._ops import mlp_planes
from monoidreduce._ops.mlp import ACTIVATIONS

pytestmark = pytest.mark.tiers("sm90")

FORWARD, BACKWARD = (f"mlp_{way}/cuda/planes/float32" for way in ("forward", "backward"))
IN_ORDER = BACKWARD.replace("planes", "planes/deterministic")
PASSES = {FORWARD, BACKWARD}
SIZES = {  # rows, hidden, width in, width out. Numbers that are no multiple of 8 are padded, but for rows.
    "one_tile": (128, 128, 64, 64),
    "ragged": (301, 1000, 128, 128),
    "unequal": (140, 328, 104, 40),
    "narrow": (500, 264, 8, 64),
    "long": (700, 3000, 128, 120),
    "odd": (301, 1003, 59, 100),
    "units": (301, 67, 64, 64),
    "outputs": (301, 1000, 64, 7),
    "wide": (301, 1000, 520, 392),
    "wide_tile": (256, 128, 256, 256),
    "wide_in": (140, 328, 1032, 64),
    "wide_out": (700, 3000, 64, 264),
    "wide_deep": (100, 456, 2056, 1032),
    "wide_odd": (301, 1003, 259, 131),
    "wide_units": (301, 67, 136, 136),
    "wide_sums": (301, 568, 264, 136),  # tiles end behind the partial sums of dbias1
}
PARTS = {"many_units": (1100, 600, 264, 320), "few_units": (1500, 200, 320, 264)}
TILE_BYTES = 12 * 256 * 128  # of hidden values, their derivatives and planes of one of them


def inputs_of(size: str, gpu: torch.device, biases: bool = True) -> Inputs:
    return scaled_mlp_inputs(SIZES[size], torch.float32, gpu, biases)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """The reference, torch's float32, must not round to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    with mr.float32("emulated"):
        yield


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, gpu: torch.device) -> None:
    check(inputs_of(size, gpu, biases), "gelu_tanh", "planes", "planes")


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("width", (64, 128, 264))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, width: int, biases: bool, gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs((257, 336, width, width), torch.float32, gpu, biases)
    check(inputs, activation, "planes", "planes")


@pytest.mark.parametrize("width", (64, 128))
def test_many_rows(width: int, gpu: torch.device) -> None:
    check(many_rows(width, torch.float32, gpu), "silu", "planes", "planes")


def far_apart(lines: int, gpu: torch.device) -> Tensor:
    """Factors of lines: every second one is 2^-40."""
    factor = torch.ones(lines, device=gpu)
    factor[1::2] = 2.0**-40
    return factor


def with_heavy_tails(t: Tensor) -> Tensor:
    return t.sign() * (3 * torch.randn_like(t)).exp()


# How x, w1 and w2 are made of normal numbers.
DRAWN: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": lambda x, w1, w2: (x, w1, w2),
    "heavy_tails": lambda x, w1, w2: (0.1 * with_heavy_tails(x), 0.1 * w1, with_heavy_tails(w2)),
    "large_rows": lambda x, w1, w2: (2.0**40 * x, w1, w2),
    "rows_far_apart": lambda x, w1, w2: (x * far_apart(len(x), x.device)[:, None], w1, w2),
    "units_of_w1_far_apart": lambda x, w1, w2: (x, w1 * far_apart(len(w1), x.device)[:, None], w2),
    "units_of_w2_far_apart": lambda x, w1, w2: (x, w1, w2 * far_apart(w2.shape[1], x.device)),
}


# How many times torch's error they may have. With heavy tails few products make up a sum.
BOUNDS = {"normal": 1.25, "heavy_tails": 2.0}
# Hidden values of large rows jump where their argument crosses 0, and so do these gradients.
JUMPING = {"large_rows": ("d_x", "d_w1")}


def error_norm(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def outputs_and_gradients(call: Callable[..., Any], inputs: Inputs, activation: str) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    out = call(**leaves, activation=activation)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("width", (64, 128, 256, 1024))
def test_error_norms(width: int, drawn: str, activation: str, gpu: torch.device) -> None:
    """Beside those of torch's products in float32."""
    inputs = mlp_inputs(1000, width, 1000, width, dtype=torch.float32, device=gpu)
    inputs = dict(zip(inputs, DRAWN[drawn](*inputs.values()), strict=True))
    in_double = {name: t.double() for name, t in inputs.items()}
    with takes(PASSES):
        found = outputs_and_gradients(mr.mlp, inputs, activation)
    exact = outputs_and_gradients(reference.mlp, in_double, activation)
    base = outputs_and_gradients(reference.mlp, inputs, activation)
    for name, y, ref, of_torch in zip(("out", "d_x", "d_w1", "d_w2"), found, exact, base, strict=True):
        if name in JUMPING.get(drawn, ()):
            continue
        ours, theirs = error_norm(y, ref), error_norm(of_torch, ref)
        assert ours <= BOUNDS.get(drawn, 1.5) * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


@pytest.mark.parametrize("wanted", ("x", "w1", "w2", "bias1", "bias2"))
@pytest.mark.parametrize("size", ("ragged", "odd", "wide", "wide_odd"))
def test_one_gradient_alone(size: str, wanted: str, gpu: torch.device) -> None:
    """Has the bits that it has beside the others: each gradient has a kernel, or a product, of its own."""
    inputs = inputs_of(size, gpu)
    of_all = dict(zip(inputs, outputs_and_gradients(mr.mlp, inputs, "gelu")[1:], strict=True))
    leaf = inputs[wanted].requires_grad_()
    out = mr.mlp(**inputs, activation="gelu")
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    (found,) = torch.autograd.grad(out, leaf, grad)
    assert torch.equal(found, of_all[wanted])


@pytest.mark.parametrize("size", ("ragged", "wide"))
@pytest.mark.parametrize("layout", ("transposed", "every_second"))
def test_strides(layout: str, size: str, gpu: torch.device) -> None:
    inputs = inputs_of(size, gpu)
    if layout == "transposed":
        laid = {name: t.T.contiguous().T if t.dim() == 2 else t for name, t in inputs.items()}
    else:
        laid = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in inputs.items()}
    with takes(PASSES):
        found = outputs_and_gradients(mr.mlp, laid, "silu")
    for y, expected in zip(found, outputs_and_gradients(mr.mlp, inputs, "silu"), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("value", (torch.inf, -torch.inf, torch.nan))
@pytest.mark.parametrize("place", ("x", "w1", "w2", "bias1", "bias2"))
@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_what_is_not_finite(activation: str, place: str, value: float, gpu: torch.device) -> None:
    """In its place: an element of w2 that is not finite spoils one column of the output.

    The derivative of relu is multiplied by the gradient of a hidden value, which is not finite where w2 is
    not; torch selects 0 there (docs/edge_semantics.md).
    """
    inputs = scaled_mlp_inputs((200, 300, 64, 72), torch.float32, gpu, biases=True)
    at = (7,) if "bias" in place else (10, 7)
    inputs[place][at] = value
    differentiate = [name for name in inputs if (activation, place, name) != ("relu", "w2", "x")]
    with takes(PASSES):
        check_operator("mlp", inputs, {"activation": activation}, differentiate=differentiate)


@pytest.mark.parametrize("place", ("x", "w1"))
@pytest.mark.parametrize("activation", ("relu", "gelu"))
@pytest.mark.parametrize("second", (torch.inf, -torch.inf))
def test_two_infinities_in_a_line(second: float, activation: str, place: str, gpu: torch.device) -> None:
    """Dot products with the line are NaN or infinities, by the signs of the other line's numbers."""
    inputs = scaled_mlp_inputs((200, 300, 64, 72), torch.float32, gpu, biases=True)
    inputs[place][10, 7:9] = torch.tensor([torch.inf, second])
    with takes(PASSES):
        check_operator("mlp", inputs, {"activation": activation})


@pytest.mark.parametrize("size", ("ragged", "long", "wide", "wide_out"))
def test_same_bits(size: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every run, and in the deterministic mode, which needs no setting of cuBLAS."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    inputs = inputs_of(size, gpu)
    call = Specimen("mlp", "mlp", mlp_inputs)
    grads = upstreams(call, inputs)
    with takes(PASSES):
        first = results(call, inputs, grads)
        assert_same_bits(results(call, inputs, grads), first)
    torch.use_deterministic_algorithms(True)
    try:
        with takes(PASSES if "wide" in size else {FORWARD, IN_ORDER}):
            assert_same_bits(results(call, inputs, grads), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("width", (64, 128, 264))
def test_stages_are_released_after_they_are_read(width: int, gpu: torch.device) -> None:
    """100 calls have the same bits: a warp reads scales before TMA overwrites them (block/ring.cuh)."""
    inputs = scaled_mlp_inputs((1000, 1000, width, width), torch.float32, gpu, biases=True)
    call = Specimen("mlp", "mlp", mlp_inputs)
    grads = upstreams(call, inputs)
    with takes(PASSES):
        first = results(call, inputs, grads)
        for _ in range(100):
            assert_same_bits(results(call, inputs, grads), first)


# Wide MLPs in parts


@pytest.mark.parametrize(
    ("of", "tiles", "forward", "backward"),
    (
        ("many_units", 1, 5 * 5, 5 * 5),
        ("many_units", 2, 2 * 5, 5 * 3),
        ("many_units", 3, 1 * 5, 5 * 2),
        ("few_units", 2, 2 * 2, 6 * 1),
        ("few_units", 4, 1 * 2, 3 * 1),
    ),
)
def test_several_parts(of: str, tiles: int, forward: int, backward: int, gpu: torch.device) -> None:
    """Of rows times of hidden units, in a workspace of so many tiles. The last ones are smaller."""
    inputs = scaled_mlp_inputs(PARTS[of], torch.float32, gpu, biases=True)
    before = mr._C.path_counts()
    with mr.workspace(tiles * TILE_BYTES):
        check(inputs, "gelu", "planes", "planes")
    after = mr._C.path_counts()
    assert [after[path] - before.get(path, 0) for path in (FORWARD, BACKWARD)] == [forward, backward]


@pytest.mark.parametrize("of", PARTS)
def test_same_bits_of_parts(of: str, gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(PARTS[of], torch.float32, gpu, biases=True)
    call = Specimen("mlp", "mlp", mlp_inputs)
    grads = upstreams(call, inputs)
    with mr.workspace(2 * TILE_BYTES), takes(PASSES):
        first = results(call, inputs, grads)
        for _ in range(3):
            assert_same_bits(results(call, inputs, grads), first)


def test_a_workspace_that_holds_no_tile(gpu: torch.device) -> None:
    """Of planes. It holds 128 rows for torch."""
    inputs = scaled_mlp_inputs(PARTS["few_units"], torch.float32, gpu)
    with mr.workspace(TILE_BYTES - 1):
        explanation = mr.explain("mlp", *inputs.values())
        assert "holds no tile of hidden values" in str(explanation)
        assert "/torch/" in explanation.forward and "/torch/" in explanation.backward
        with takes(set()):
            check_operator("mlp", inputs, {"activation": "gelu"})
    with mr.workspace(0):
        check(inputs, "gelu", "simt", "simt")


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_a_row_that_is_not_finite(value: float, gpu: torch.device) -> None:
    """Spoils itself alone, and the gradients of the weights."""
    inputs = inputs_of("wide", gpu)
    inputs["x"][17, 3] = value
    x = inputs["x"].requires_grad_()
    with takes(PASSES):
        out = mr.mlp(**inputs, activation="gelu")
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    others = torch.arange(len(x), device=gpu) != 17
    assert not out[17].isfinite().any() and out[others].isfinite().all()
    assert not dx[17].isfinite().any() and dx[others].isfinite().all()


def test_captured_in_a_graph(gpu: torch.device) -> None:
    sizes = PARTS["many_units"]
    leaves = {
        name: t.requires_grad_()
        for name, t in scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True).items()
    }
    grad = torch.randn(sizes[0], sizes[3], device=gpu)

    def step() -> tuple[Tensor, ...]:
        with mr.workspace(2 * TILE_BYTES):
            out = mr.mlp(**leaves)
            return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    check_captured(step)


def test_memory_of_parts(gpu: torch.device) -> None:
    """The workspace, and planes: of the operands, backward also twice of the upstream gradient."""
    rows, hidden, width, workspace = 4096, 16384, 512, 64 << 20
    inputs = scaled_mlp_inputs((rows, hidden, width, width), torch.float32, gpu)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grad = torch.randn(rows, width, device=gpu)
    of_rows, of_units = ((4 * width + 16) * lines for lines in (rows, hidden))
    with mr.workspace(workspace), takes(PASSES):
        before = reset_peak()
        out = mr.mlp(**leaves)
        assert peak() - before <= out.nbytes + workspace + of_rows + 2 * of_units + (1 << 20)
        before = reset_peak()
        torch.autograd.grad(out, list(leaves.values()), grad)
        gradients = sum(t.nbytes for t in leaves.values())
        assert peak() - before <= gradients + workspace + 3 * of_rows + 2 * of_units + (1 << 20)


def test_is_explained(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu, biases=False)
    explanation = mr.explain("mlp", *inputs.values())
    assert {explanation.forward, explanation.backward} == PASSES
    assert any("float32 as planes of float16" in reason for reason in explanation.reasons)


# With a gate. The kernel between the products has no planes, so `takes` cannot tell that products have them.


class Products:
    """How many products of planes an MLP with a gate has computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_lines = self.of_matrices = 0
        dots, product = mlp_planes.plane_dots, mlp_planes.plane_product

        def counted_dots(*args: Any) -> None:
            self.of_lines += 1
            dots(*args)

        def counted_product(*args: Any) -> None:
            self.of_matrices += 1
            product(*args)

        monkeypatch.setattr(mlp_planes, "plane_dots", counted_dots)
        monkeypatch.setattr(mlp_planes, "plane_product", counted_product)


GATED_PARTS = {  # as PARTS. A hidden unit of a row takes 16 bytes: its gate, too
    "units": ((700, 600, 264, 320), 16 * 128 * 700),
    "rows": ((1500, 200, 320, 264), 12 * 256 * 200),  # as many bytes as the same MLP without its gate needs
}
GATED_SIZES = {  # rows, width in, hidden, width out
    "one_tile": (128, 64, 128, 64),
    "ragged": (301, 128, 1000, 128),
    "odd": (301, 59, 1003, 131),
    "units": (301, 136, 67, 136),
    "rows": (65, 264, 520, 392),
    "deep": (100, 2056, 456, 1032),
}


def gated_inputs(size: str, gpu: torch.device, biases: bool = True) -> Inputs:
    given = dict.fromkeys(("bias1", "gate_bias", "bias2"), biases)
    inputs = mlp_inputs(*GATED_SIZES[size], dtype=torch.float32, device=gpu, gate=True, **given)
    inputs["w2"] = inputs["w2"] / GATED_SIZES[size][2] ** 0.5
    return inputs


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", GATED_SIZES)
def test_gated_sizes(size: str, biases: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(monkeypatch)
    check_operator("mlp", gated_inputs(size, gpu, biases), {"activation": "silu"})
    assert products.of_lines >= 5 and products.of_matrices >= 6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: str, gpu: torch.device) -> None:
    check_operator("mlp", gated_inputs("ragged", gpu), {"activation": activation})


@pytest.mark.parametrize("of", GATED_PARTS)
def test_gated_parts(of: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 rows or hidden units in the backward pass."""
    (rows, hidden, width, outputs), tile_bytes = GATED_PARTS[of]
    given = dict.fromkeys(("bias1", "gate_bias", "bias2"), True)
    sizes = (rows, width, hidden, outputs)
    inputs = mlp_inputs(*sizes, dtype=torch.float32, device=gpu, gate=True, **given)
    inputs["w2"] = inputs["w2"] / hidden**0.5
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    products = Products(monkeypatch)
    with mr.workspace(tile_bytes):
        check_operator("mlp", inputs, {"activation": "gelu"})
        out = mr.mlp(**leaves, activation="gelu")
        before = products.of_lines
        torch.autograd.grad(out.sum(), list(leaves.values()))
    parts = -(-(hidden if of == "units" else rows) // 128)
    assert products.of_lines - before == 3 * parts


@pytest.mark.parametrize("wanted", ("x", "w1", "w2", "gate", "bias1", "gate_bias", "bias2"))
def test_one_gradient_of_a_gated_mlp(wanted: str, gpu: torch.device) -> None:
    check_operator("mlp", gated_inputs("odd", gpu), {"activation": "silu"}, differentiate=[wanted])


@pytest.mark.parametrize("layout", ("transposed", "gaps", "offset1", "padded_rows"))
def test_strides_of_a_gated_mlp(layout: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    products, inputs = Products(monkeypatch), gated_inputs("ragged", gpu)
    check_operator("mlp", {name: LAYOUTS[layout](t) for name, t in inputs.items()}, {"activation": "silu"})
    assert products.of_lines and products.of_matrices


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("width", (64, 256, 1024))
def test_error_norms_of_a_gated_mlp(
    width: int, drawn: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those of torch's products in float32."""
    inputs = mlp_inputs(1000, width, 1000, width, dtype=torch.float32, device=gpu, gate=True)
    gate = inputs.pop("gate")
    inputs = dict(zip(inputs, DRAWN[drawn](*inputs.values()), strict=True)) | {"gate": gate}
    in_double = {name: t.double() for name, t in inputs.items()}
    products = Products(monkeypatch)
    found = outputs_and_gradients(mr.mlp, inputs, "silu")
    assert products.of_lines == 5 and products.of_matrices == 6
    exact = outputs_and_gradients(reference.mlp, in_double, "silu")
    base = outputs_and_gradients(reference.mlp, inputs, "silu")
    names = ("out", "d_x", "d_w1", "d_w2", "d_gate")
    for name, y, ref, of_torch in zip(names, found, exact, base, strict=True):
        ours, theirs = error_norm(y, ref), error_norm(of_torch, ref)
        assert ours <= BOUNDS.get(drawn, 1.5) * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


def test_same_bits_of_a_gated_mlp(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every run, and in the deterministic mode, which needs no setting of cuBLAS."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    call = Specimen("gated", "mlp", gated_inputs, options={"activation": "silu"})
    inputs = gated_inputs("rows", gpu)
    grads = upstreams(call, inputs)
    first = results(call, inputs, grads)
    assert_same_bits(results(call, inputs, grads), first)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(results(call, inputs, grads), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_a_row_of_a_gated_mlp_that_is_not_finite(value: float, gpu: torch.device) -> None:
    """Spoils itself alone, and the gradients of the weights."""
    inputs = gated_inputs("rows", gpu)
    inputs["x"][17, 3] = value
    x = inputs["x"].requires_grad_()
    out = mr.mlp(**inputs, activation="gelu")
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    others = torch.arange(len(x), device=gpu) != 17
    assert not out[17].isfinite().any() and out[others].isfinite().all()
    assert not dx[17].isfinite().any() and dx[others].isfinite().all()


@pytest.mark.parametrize("sizes", ((63, 264, 400, 264), (300, 56, 400, 264)), ids=str)
def test_few_rows_or_terms_of_a_gated_mlp(
    sizes: tuple[int, int, int, int], gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies."""
    products = Products(monkeypatch)
    inputs = mlp_inputs(*sizes, dtype=torch.float32, device=gpu, gate=True)
    check_operator("mlp", inputs, {"activation": "silu"})
    assert products.of_lines == products.of_matrices == 0
    assert any("are torch's" in reason for reason in mr.explain("mlp", **inputs).reasons)


def test_a_gated_mlp_is_explained(gpu: torch.device) -> None:
    explanation = mr.explain("mlp", **gated_inputs("ragged", gpu))
    assert any("float32 as planes of float16" in reason for reason in explanation.reasons)


def test_memory_of_a_gated_mlp(gpu: torch.device) -> None:
    """The workspace, and planes: of the operands, backward also twice of the upstream gradient."""
    rows, hidden, width, workspace = 4096, 16384, 512, 64 << 20
    inputs = mlp_inputs(rows, width, hidden, width, dtype=torch.float32, device=gpu, gate=True)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grad = torch.randn(rows, width, device=gpu)
    of_rows, of_units = ((4 * width + 16) * lines for lines in (rows, hidden))
    with mr.workspace(workspace):
        before = reset_peak()
        out = mr.mlp(**leaves, activation="silu")
        assert peak() - before <= out.nbytes + workspace + of_rows + 3 * of_units + (1 << 20)
        before = reset_peak()
        torch.autograd.grad(out, list(leaves.values()), grad)
        gradients = sum(t.nbytes for t in leaves.values())
        assert peak() - before <= gradients + workspace + 3 * of_rows + 3 * of_units + (1 << 20)
