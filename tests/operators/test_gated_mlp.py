"""mlp with a gate: sizes, activations, biases, parts and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specimens import DTYPES, Inputs, integers, mlp_inputs, name_of
from tolerance import check_operator, check_pooled, content
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce._ops.gated_mlp import backward_part, forward_part
from monoidreduce.reference import ACTIVATIONS

NAMES = ("x", "w1", "w2", "bias1", "bias2", "gate", "gate_bias")
SIZES = {  # rows, width, hidden, outputs
    "one_of_each": (1, 1, 1, 1),
    "one_row": (1, 64, 513, 64),
    "one_unit": (300, 20, 1, 33),
    "ragged": (130, 65, 257, 33),
    "many_units": (33, 16, 2049, 24),
    "many_rows": (1031, 24, 64, 20),
}
EMPTY = {"rows": (0, 5, 7, 3), "width": (6, 0, 7, 3), "hidden": (6, 5, 0, 3), "outputs": (6, 5, 7, 0)}
# A workspace of 0 has parts of 128. The smaller gradients are summed: "units" sums the gradient of x, "rows"
# the gradients of weights.
PARTS = {"units": (200, 24, 700, 20), "rows": (700, 40, 200, 24)}


def gated_inputs(sizes: Any, dtype: torch.dtype, device: torch.device, biases: bool = True) -> Inputs:
    given = {"bias1": biases, "bias2": biases, "gate": True, "gate_bias": biases}
    return mlp_inputs(*sizes, dtype=dtype, device=device, **given)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that torch's ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.isa
@pytest.mark.parametrize("biases", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, dtype: torch.dtype, biases: bool, device: torch.device) -> None:
    """The upstream gradient is dense, so that cuBLAS is asked for the same products as the base's. Of another
    layout it may sum in another order. Those are in `test_layouts`, and in tests/gpu/test_mlp_gated.py."""
    check_pooled(
        "mlp",
        lambda: gated_inputs(SIZES[size], dtype, device, biases),
        {"activation": "silu"},
        upstream="contiguous",
    )


@pytest.mark.parametrize("empty", EMPTY)
def test_empty_axes(empty: str, device: torch.device) -> None:
    inputs = gated_inputs(EMPTY[empty], torch.float32, device)
    results = check_operator("mlp", inputs)
    if empty == "hidden":
        assert torch.equal(results["out0"], inputs["bias2"].expand(6, -1)) and not results["d_x"].any()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    check_operator("mlp", gated_inputs((57, 19, 67, 23), dtype, device), {"activation": activation})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("workspace", (0, 1 << 30))
@pytest.mark.parametrize("activation", ("silu", "gelu"))
def test_accuracy(activation: str, workspace: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to matrices, in float32 too."""
    with mr.workspace(workspace):
        check_operator("mlp", gated_inputs((400, 64, 513, 64), dtype, device), {"activation": activation})


@pytest.mark.parametrize("bias1, gate_bias, bias2", list(itertools.product((False, True), repeat=3)))
def test_biases(bias1: bool, gate_bias: bool, bias2: bool, device: torch.device) -> None:
    given = {"bias1": bias1, "gate": True, "gate_bias": gate_bias, "bias2": bias2}
    inputs = mlp_inputs(dtype=torch.float32, device=device, **given)
    check_operator("mlp", inputs, {"activation": "silu"})


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    check_pooled("mlp", lambda: gated_inputs(((3, 14), 19, 67, 23), dtype, device), upstream=layout)


@pytest.mark.parametrize("shape", ((), (6,), (2, 1, 5), (0, 3)), ids=str)
def test_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = gated_inputs((shape, 19, 67, 23), torch.float64, device)
    assert check_operator("mlp", inputs)["out0"].shape == (*shape, 23)


@pytest.mark.parametrize("workspace", (0, 1 << 30))
@pytest.mark.parametrize(
    "names", [(), NAMES, *((n,) for n in NAMES), *itertools.combinations(NAMES, 6)], ids="-".join
)
def test_subsets_of_gradients(names: tuple[str, ...], workspace: int, device: torch.device) -> None:
    inputs = gated_inputs(PARTS["units"], torch.float32, device)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    with mr.workspace(workspace):
        check_operator("mlp", inputs, {"activation": "silu"}, differentiate=names)
        out = mr.mlp(**leaves)
        assert out.requires_grad == bool(names)
        if names:
            out.square().sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)


@pytest.mark.parametrize("activation", ("relu", "relu2", "identity"))
@pytest.mark.parametrize("workspace", (0, 1 << 30))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_integers_are_exact(
    dtype: torch.dtype, workspace: int, activation: str, device: torch.device
) -> None:
    """Sparse small integers make every sum exact in every dtype, so any other result is a wrong index."""
    inputs = mlp_inputs(
        150,
        21,
        260,
        33,
        dtype=dtype,
        device=device,
        gate=True,
        draw=lambda *shape, **place: integers(*shape, **place, density=0.08),
    )
    wide = {name: t.double().requires_grad_() for name, t in inputs.items()}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    upstream = integers(150, 33, dtype=dtype, device=device, density=0.1)
    with mr.workspace(workspace):
        out = mr.mlp(**leaves, activation=activation)
        found = torch.autograd.grad(out, list(leaves.values()), upstream)
    act = ACTIVATIONS[activation]
    exact = (act(wide["x"] @ wide["gate"].T) * (wide["x"] @ wide["w1"].T)) @ wide["w2"].T
    gradients = torch.autograd.grad(exact, list(wide.values()), upstream.double())
    for name, y, ref in zip(("out", *leaves), (out, *found), (exact, *gradients), strict=True):
        assert ref.any() and torch.equal(y, ref.to(dtype)), name


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_parts(part: str, dtype: torch.dtype, device: torch.device) -> None:
    """Several parts each way, and no tensor of all rows and hidden units."""
    rows, width, hidden, outputs = PARTS[part]
    inputs = gated_inputs(PARTS[part], dtype, device)
    assert forward_part(rows, hidden, dtype, 0) == (128, hidden)
    assert (
        backward_part(rows, width, hidden, outputs, dtype, 0)
        == {
            "units": (rows, 128),
            "rows": (128, hidden),
        }[part]
    )
    with mr.workspace(0), Largest() as largest:
        check_operator("mlp", inputs, {"activation": "silu"}, function=mr.mlp)
        largest.elements = 0
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        mr.mlp(**leaves).sum().backward()
    assert largest.elements < rows * hidden


def test_parts_are_as_large_as_the_workspace_allows_and_alike() -> None:
    """SwiGLU of Llama 3 8B: two matrices of hidden values forward, three backward."""
    llama = (8192, 4096, 14336, 4096)
    assert forward_part(8192, 14336, torch.bfloat16, 352 << 20) == (4096, 14336)
    assert backward_part(*llama, torch.bfloat16, 352 << 20) == (8192, 7168)
    assert forward_part(8192, 14336, torch.bfloat16, 1 << 40) == (8192, 14336)
    assert backward_part(*llama, torch.bfloat16, 1 << 40) == (8192, 14336)
    # Many rows: the gradients of weights are less to sum.
    assert backward_part(65536, 4096, 14336, 4096, torch.bfloat16, 352 << 20) == (4096, 14336)
    for workspace in (1 << 20, 10 << 20, 100 << 20):
        rows, units = backward_part(*llama, torch.bfloat16, workspace)
        assert rows * units * 6 <= max(workspace, 128 * rows * 6) and rows == 8192 and units % 128 == 0


@pytest.mark.parametrize("activation, function", (("silu", F.silu), ("gelu", F.gelu)))
def test_is_swiglu_and_geglu(activation: str, function: Any, device: torch.device) -> None:
    up, gate, down = (
        torch.nn.Linear(*sizes, bias=False, dtype=torch.float64, device=device)
        for sizes in ((19, 67), (19, 67), (67, 23))
    )
    x = torch.randn(2, 5, 19, dtype=torch.float64, device=device)
    ours = mr.mlp(x, up.weight, down.weight, gate=gate.weight, activation=activation)
    torch.testing.assert_close(ours, down(function(gate(x)) * up(x)), rtol=1e-11, atol=1e-12)


def test_repeated_calls_have_the_same_bits(device: torch.device) -> None:
    inputs = gated_inputs(PARTS["units"], torch.float32, device)
    leaves = [t.requires_grad_() for t in inputs.values()]

    def bits() -> list[Tensor]:
        with mr.workspace(0):
            out = mr.mlp(**inputs, activation="silu")
            return [content(t) for t in (out, *torch.autograd.grad(out.square().sum(), leaves))]

    assert all(map(torch.equal, bits(), bits()))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    """All operands are cast, and the products inside are not: as a call in that dtype."""
    inputs = gated_inputs((40, 16, 130, 24), torch.float32, device)
    with torch.autocast(device.type, dtype):
        out = mr.mlp(**inputs, activation="silu")
    assert out.dtype == dtype
    assert torch.equal(out, mr.mlp(**{n: t.to(dtype) for n, t in inputs.items()}, activation="silu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, device: torch.device) -> None:
    inputs = gated_inputs((40, 16, 130, 24), dtype, device)
    clean = mr.mlp(**inputs, activation="silu")
    inputs["x"] = inputs["x"].clone()
    inputs["x"][3, 5], inputs["x"][7, 2] = torch.nan, torch.inf
    out = mr.mlp(**inputs, activation="silu")
    others = [row for row in range(40) if row not in (3, 7)]
    assert out[3].isnan().all() and not out[7].isfinite().any()
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize(
    "changes, error, message",
    (
        (
            {"gate": torch.zeros(16, 9)},
            ValueError,
            "gate: expected shape [K=16, M=8] as w1 is [16, 8] and x is [5, 8], got",
        ),
        (
            {"gate": torch.zeros(17, 8)},
            ValueError,
            "gate: expected shape [K=16, M=8] as w1 is [16, 8] and x is [5, 8], got",
        ),
        (
            {"gate_bias": torch.zeros(17)},
            ValueError,
            "gate_bias: expected shape [K=16] as w1 is [16, 8], got [17]",
        ),
        ({"gate": None}, ValueError, "gate_bias: expected None, where gate is, got a tensor"),
        ({"gate": torch.zeros(16, 8).double()}, TypeError, "gate: expected torch.float32 as x"),
        ({"gate": 1.0}, TypeError, "gate: expected a tensor, got 1.0"),
        ({"gate_bias": torch.zeros(16, device="meta")}, ValueError, "gate_bias: expected a tensor on cpu"),
    ),
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"gate": torch.zeros(16, 8), "gate_bias": torch.zeros(16)} | changes
    before = mr._C.path_counts()
    with pytest.raises(error, match=re.escape(message)):
        mr.mlp(torch.zeros(5, 8), torch.zeros(16, 8), torch.zeros(6, 16), **given)
    assert mr._C.path_counts() == before


@pytest.mark.parametrize("name", ("gated_hidden", "gated_gradient"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_the_cpu_has_no_hidden_values_of_16_bits(dtype: torch.dtype, name: str) -> None:
    tensors = [torch.zeros(3, 4, dtype=dtype) for _ in range(2 if name == "gated_hidden" else 3)]
    with pytest.raises(ValueError, match="gate: expected float32 or float64 on the CPU, got"):
        getattr(mr._C, name)(*tensors, 0, 1, 0)


def test_explain() -> None:
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, w1, w2 = meta(2, 4096, 4096), meta(14336, 4096), meta(4096, 14336)
    explanation = mr.explain("mlp", x, w1, w2, gate=w1, hardware="h100")
    assert explanation.forward == "mlp_forward/cuda/simt/bfloat16" and explanation.deterministic
    assert explanation.backward == "mlp_backward/cuda/simt/bfloat16" and explanation.tiles is None
    assert "forward: parts of 4096 of 8192 rows and 14336 of 14336 hidden units" in explanation.reasons
    assert "backward: parts of 8192 of 8192 rows and 7168 of 14336 hidden units" in explanation.reasons


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_explain_names_the_paths_of_a_call(dtype: torch.dtype, device: torch.device) -> None:
    inputs = gated_inputs((40, 16, 130, 24), dtype, device)
    before = mr._C.path_counts()
    mr.mlp(**{name: t.requires_grad_() for name, t in inputs.items()}).sum().backward()
    ran = {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}
    explanation = mr.explain("mlp", **inputs)
    assert ran == {explanation.forward, explanation.backward}
