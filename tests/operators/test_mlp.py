"""mlp: sizes, activations, biases and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from specimens import DTYPES, integers, mlp_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce.reference import ACTIVATIONS

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 129, 257)
HIDDEN = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 513, 1031)
WIDTHS = (0, 1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 128, 131)
BIASES = ((False, False), (True, False), (False, True), (True, True))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", (33, 300))
def test_number_of_rows(rows: int, hidden: int, device: torch.device) -> None:
    check_operator(
        "mlp", mlp_inputs(rows, hidden=hidden, dtype=torch.float32, device=device, bias1=True, bias2=True)
    )


@pytest.mark.isa
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("bias1, bias2", BIASES)
def test_number_of_hidden_units(hidden: int, bias1: bool, bias2: bool, device: torch.device) -> None:
    inputs = mlp_inputs(9, hidden=hidden, dtype=torch.float32, device=device, bias1=bias1, bias2=bias2)
    results = check_operator("mlp", inputs)
    if hidden == 0:
        assert torch.equal(
            results["out0"], inputs["bias2"].expand(9, -1) if bias2 else torch.zeros_like(results["out0"])
        )


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("axis", ("width", "outputs", "both"))
@pytest.mark.parametrize("biases", (False, True), ids=("no_bias", "bias"))
def test_widths(axis: str, size: int, biases: bool, device: torch.device) -> None:
    sizes = {"width": size, "outputs": size} if axis == "both" else {axis: size}
    inputs = mlp_inputs(
        34, hidden=45, **sizes, dtype=torch.float32, device=device, bias1=biases, bias2=biases
    )
    check_operator("mlp", inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias1, bias2", BIASES)
def test_activations(
    activation: str, bias1: bool, bias2: bool, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = mlp_inputs(dtype=dtype, device=device, bias1=bias1, bias2=bias2)
    check_operator("mlp", inputs, {"activation": activation})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_accuracy(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to x, w1, w2 and the output, in float32 too."""
    inputs = mlp_inputs(400, 64, 513, 64, dtype=dtype, device=device, bias1=True, bias2=True)
    check_operator("mlp", inputs, {"activation": activation})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=name_of)
def test_activations_over_their_whole_range(
    activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """One hidden unit that reads values from -40 to 40 exactly: tails, the bend, and 0 itself."""
    x = torch.cat((torch.linspace(-40, 40, 321, device=device), torch.linspace(-2, 2, 257, device=device)))
    ones = torch.ones(1, 1, dtype=dtype, device=device)
    inputs = {"x": x.to(dtype)[:, None], "w1": ones, "w2": ones}
    results = check_operator("mlp", inputs, {"activation": activation}, upstream="contiguous")
    assert results["out0"].isfinite().all() and results["d_x"].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "rows, width, hidden, outputs",
    ((1, 64, 513, 64), (130, 65, 257, 33), (256, 128, 1031, 96), (257, 16, 64, 200)),
)
def test_sizes_in_every_dtype(
    rows: int, width: int, hidden: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = mlp_inputs(rows, width, hidden, outputs, dtype=dtype, device=device, bias1=True, bias2=True)
    check_operator("mlp", inputs, {"activation": "silu"})


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    check_operator(
        "mlp", mlp_inputs((3, 14), dtype=dtype, device=device, bias1=True, bias2=True), upstream=layout
    )


@pytest.mark.parametrize("shape", ((), (6,), (2, 3), (2, 1, 5), (0, 3)), ids=str)
def test_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = mlp_inputs(shape, dtype=torch.float64, device=device, bias1=True, bias2=True)
    assert check_operator("mlp", inputs)["out0"].shape == (*shape, 23)


NAMES = ("x", "w1", "w2", "bias1", "bias2")


@pytest.mark.parametrize("names", [c for r in range(6) for c in itertools.combinations(NAMES, r)], ids=str)
def test_every_subset_of_gradients(names: tuple[str, ...], device: torch.device) -> None:
    inputs = mlp_inputs(dtype=torch.float32, device=device, bias1=True, bias2=True)
    check_operator("mlp", inputs, differentiate=names)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    out = mr.mlp(**leaves)
    assert out.requires_grad == bool(names)
    if names:
        out.square().sum().backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)


@pytest.mark.parametrize("activation", ("relu", "relu2", "identity"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_integers_are_exact(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Sparse small integers make every sum exact in every dtype, so any other result is a wrong index."""
    draw = {"dtype": dtype, "device": device, "density": 0.04}
    inputs = {
        "x": integers(70, 21, **draw),
        "w1": integers(130, 21, **draw),
        "w2": integers(33, 130, **draw),
        "bias1": integers(130, **draw),
        "bias2": integers(33, **draw),
    }
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    out = mr.mlp(**leaves, activation=activation)
    expected = F.linear(
        ACTIVATIONS[activation](F.linear(wide["x"], wide["w1"], wide["bias1"])), wide["w2"], wide["bias2"]
    )
    upstream = integers(70, 33, dtype=dtype, device=device, density=0.1)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
    expected_gradients = torch.autograd.grad(expected, list(wide.values()), upstream.double())
    for name, y, ref in zip(
        ("out", *leaves), (out, *gradients), (expected, *expected_gradients), strict=True
    ):
        assert ref.any() and torch.equal(y, ref.to(dtype)), name


def test_order_of_hidden_units_does_not_matter(device: torch.device) -> None:
    inputs = mlp_inputs(65, hidden=300, dtype=torch.float64, device=device, bias1=True)
    order = torch.randperm(300, device=device)
    shuffled = mr.mlp(inputs["x"], inputs["w1"][order], inputs["w2"][:, order], bias1=inputs["bias1"][order])
    torch.testing.assert_close(mr.mlp(**inputs), shuffled, rtol=1e-11, atol=1e-12)


def test_matches_two_linear_layers(device: torch.device) -> None:
    inputs = mlp_inputs(dtype=torch.float64, device=device, bias1=True, bias2=True)
    first = torch.nn.Linear(19, 67, dtype=torch.float64, device=device)
    second = torch.nn.Linear(67, 23, dtype=torch.float64, device=device)
    expected = second(F.gelu(first(inputs["x"]), approximate="tanh"))
    ours = mr.mlp(inputs["x"], first.weight, second.weight, bias1=first.bias, bias2=second.bias)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
