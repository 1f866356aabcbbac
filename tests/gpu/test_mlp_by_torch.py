"""Wide float32 MLPs that no tensor-core kernel takes: torch computes parts of them, and no kernel of ours."""

from __future__ import annotations

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
from paths import takes
from specimens import LAYOUTS, Inputs, Specimen, mlp_inputs
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce._ops import mlp_by_torch
from monoidreduce._ops.mlp import ACTIVATIONS

FORWARD, BACKWARD = (f"mlp_{way}/cuda/torch/float32" for way in ("forward", "backward"))
SIZES = {  # rows, hidden, width in, width out
    "narrowest": (300, 200, 136, 136),
    "unaligned": (301, 403, 129, 131),
    "wide": (700, 1000, 264, 264),
    "deep": (200, 456, 1032, 1032),
    "wide_in": (140, 328, 1032, 24),
    "wide_out": (270, 301, 7, 264),
    "one_row": (1, 520, 264, 264),
    "one_unit": (130, 1, 320, 264),
    "large": (2000, 1500, 264, 392),
}
PARTS = {  # sizes, and the bytes of the smallest part of the backward pass
    "units": ((700, 600, 264, 320), 2 * 4 * 128 * 700),  # the rows' gradient is the smaller one
    "rows": ((1500, 200, 320, 264), 2 * 4 * 128 * 200),
}
CALL = Specimen("mlp", "mlp", mlp_inputs)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, torch's float32, must not round to tf32. Calls of any size are torch's."""
    assert not torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(mlp_by_torch, "_FEWEST_TERMS", 0)


def inputs_of(size: str, gpu: torch.device, biases: bool = True) -> Inputs:
    return scaled_mlp_inputs(SIZES[size], torch.float32, gpu, biases)


def explained(inputs: Inputs) -> mr.Explanation:
    tensors = [inputs[name] for name in ("x", "w1", "w2")]
    return mr.explain("mlp", *tensors, bias1=inputs.get("bias1"), bias2=inputs.get("bias2"))


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, gpu: torch.device) -> None:
    inputs = inputs_of(size, gpu, biases)
    explanation = explained(inputs)
    assert (explanation.forward, explanation.backward) == (FORWARD, BACKWARD)
    assert sum("are torch's" in reason for reason in explanation.reasons) == 2
    with takes(set()):
        check_operator("mlp", inputs, {"activation": "gelu_tanh"})


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, gpu: torch.device) -> None:
    """Whichever kernels the GPU has."""
    with takes(set()):
        check_operator("mlp", inputs_of("unaligned", gpu), {"activation": activation})


@pytest.mark.parametrize("tiles", (1, 2, 3))
@pytest.mark.parametrize("of", PARTS)
def test_parts(of: str, tiles: int, gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS[of]
    inputs = scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True)
    with mr.workspace(tiles * tile_bytes), takes(set()):
        part = mlp_by_torch.held_part(inputs["x"], inputs["w1"], inputs["w2"], None, backward=True)
        assert part == ((700, 128 * tiles) if of == "units" else (128 * tiles, 200))
        assert f"in parts of {part[0]} of" in str(explained(inputs))
        check_operator("mlp", inputs, {"activation": "gelu"})


def test_a_workspace_that_holds_no_part(gpu: torch.device) -> None:
    inputs = inputs_of("wide", gpu)
    with mr.workspace(0):
        explanation = explained(inputs)
        with takes({explanation.forward, explanation.backward}):
            check_operator("mlp", inputs, {"activation": "gelu"})
    assert "/simt/" in explanation.forward and "/simt/" in explanation.backward
    assert "the workspace holds no part" in str(explanation)


@pytest.mark.parametrize("activation", ("relu2", "gelu", "sigmoid"))
@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1", "bias2"))
def test_one_gradient_alone(name: str, activation: str, gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS["units"]
    inputs = scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True)
    with mr.workspace(2 * tile_bytes), takes(set()):
        check_operator("mlp", inputs, {"activation": activation}, differentiate=[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, gpu: torch.device) -> None:
    inputs = {name: LAYOUTS[layout](t) for name, t in inputs_of("unaligned", gpu).items()}
    with takes(set()):
        check_operator("mlp", inputs, {"activation": "silu"})


def test_leading_axes(gpu: torch.device) -> None:
    inputs = inputs_of("narrowest", gpu)
    inputs["x"] = inputs["x"].reshape(3, 100, 136)
    with takes(set()):
        found = check_operator("mlp", inputs, {"activation": "silu"})
    assert found["out0"].shape == (3, 100, 136)


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
@pytest.mark.parametrize("place", ("x", "w1", "w2", "bias1", "bias2"))
@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_what_is_not_finite(activation: str, place: str, value: float, gpu: torch.device) -> None:
    """In the places that torch gives it."""
    inputs = inputs_of("unaligned", gpu)
    inputs[place][(7,) if "bias" in place else (10, 7)] = value
    with takes(set()):
        check_operator("mlp", inputs, {"activation": activation})


def test_a_row_of_nan(gpu: torch.device) -> None:
    """Spoils itself alone, and the gradients of the weights."""
    inputs = inputs_of("wide", gpu)
    inputs["x"][17, 3] = torch.nan
    x = inputs["x"].requires_grad_()
    out = mr.mlp(**inputs, activation="gelu")
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    others = torch.arange(len(x), device=gpu) != 17
    assert out[17].isnan().all() and out[others].isfinite().all()
    assert dx[17].isnan().all() and dx[others].isfinite().all()


@pytest.mark.parametrize(
    "sizes", ((0, 512, 320, 264), (130, 0, 320, 264), (130, 512, 0, 264), (130, 512, 320, 0)), ids=str
)
def test_empty_sizes(sizes: tuple[int, int, int, int], gpu: torch.device) -> None:
    leaves = {
        name: t.requires_grad_()
        for name, t in scaled_mlp_inputs(
            tuple(max(size, 1) for size in sizes), torch.float32, gpu, biases=True
        ).items()
    }
    rows, hidden, width, outputs = sizes
    x, w1, w2 = leaves["x"][:rows, :width], leaves["w1"][:hidden, :width], leaves["w2"][:outputs, :hidden]
    bias1, bias2 = leaves["bias1"][:hidden], leaves["bias2"][:outputs]
    out = mr.mlp(x, w1, w2, bias1=bias1, bias2=bias2)
    assert out.shape == (rows, outputs)
    if hidden == 0:
        assert torch.equal(out, bias2.expand(rows, -1))
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert gradient.isfinite().all()


def step_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    return results(CALL, inputs, upstreams(CALL, inputs))


@pytest.mark.parametrize("of", PARTS)
def test_same_bits_in_the_deterministic_mode(of: str, gpu: torch.device, deterministic: None) -> None:
    sizes, tile_bytes = PARTS[of]
    inputs = scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True)
    grads = upstreams(CALL, inputs)
    with mr.workspace(tile_bytes), takes(set()):
        first = results(CALL, inputs, grads)
        for _ in range(3):
            assert_same_bits(results(CALL, inputs, grads), first)


def test_the_deterministic_mode_without_the_setting_of_cublas(
    gpu: torch.device, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's products would raise, and kernels for ordinary cores take the call."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    inputs = inputs_of("narrowest", gpu)
    explanation = explained(inputs)
    assert "/simt/" in explanation.forward and "CUBLAS_WORKSPACE_CONFIG" in str(explanation)
    with takes({explanation.forward, explanation.backward}):
        step_of(inputs)


def test_captured_in_a_graph(gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS["units"]
    leaves = {
        name: t.requires_grad_()
        for name, t in scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True).items()
    }
    grad = torch.randn(sizes[0], sizes[3], device=gpu)

    def step() -> tuple[torch.Tensor, ...]:
        with mr.workspace(tile_bytes):
            out = mr.mlp(**leaves)
            return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    with takes(set()):
        check_captured(step)


def test_memory_is_bounded_by_the_workspace(gpu: torch.device) -> None:
    """Beyond inputs, results and gradients."""
    rows, hidden, width, workspace = 4096, 16384, 512, 32 << 20
    leaves = {
        name: t.requires_grad_()
        for name, t in scaled_mlp_inputs((rows, hidden, width, width), torch.float32, gpu).items()
    }
    grad = torch.randn(rows, width, device=gpu)
    assert workspace < 4 * rows * hidden
    torch.autograd.grad(mr.mlp(**leaves), list(leaves.values()), grad)  # cuBLAS's own workspace stays
    with mr.workspace(workspace), takes(set()):
        before = reset_peak()
        out = mr.mlp(**leaves)
        assert peak() - before <= out.nbytes + workspace + (1 << 20)
        before = reset_peak()
        torch.autograd.grad(out, list(leaves.values()), grad)
        assert peak() - before <= sum(t.nbytes for t in leaves.values()) + workspace + (1 << 20)


def test_under_autocast(gpu: torch.device) -> None:
    """Products inside of the op are in the dtype of its operands: autocast casts those, and nothing else."""
    inputs = inputs_of("narrowest", gpu)
    expected = mr.mlp(**inputs)
    with torch.autocast("cuda", torch.bfloat16):
        assert mr.mlp(**inputs).dtype == torch.bfloat16
        inside = mlp_by_torch.forward((300, 200), *inputs.values(), "gelu_tanh")
    assert torch.equal(inside, expected)


# In tf32


@pytest.mark.parametrize("sizes", ((512, 1024, 264, 264), (512, 512, 1024, 512)), ids=str)
def test_tf32(sizes: tuple[int, int, int, int], gpu: torch.device, tf32: None) -> None:
    """Beside torch's own tf32, of the same products."""
    inputs = scaled_mlp_inputs(sizes, torch.float32, gpu, biases=True)
    explanation = explained(inputs)
    assert (explanation.forward, explanation.backward) == (FORWARD, BACKWARD)
    with takes(set()):
        check_operator("mlp", inputs, {"activation": "silu"}, upstream="contiguous")
        found = mr.mlp(**inputs)
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not torch.equal(mr.mlp(**inputs), found)


def test_tf32_up_to_256_wide_takes_our_kernels(gpu: torch.device, tf32: None) -> None:
    inputs = scaled_mlp_inputs((300, 200, 136, 136), torch.float32, gpu)
    assert "/sm80/" in explained(inputs).forward


@pytest.mark.parametrize("mode", ("simt", "emulated"))
def test_a_mode_that_excludes_tf32(mode: str, gpu: torch.device, tf32: None) -> None:
    """Few rows, which have no planes. What torch would round is multiplied by kernels, exactly."""
    inputs = scaled_mlp_inputs((40, 200, 264, 264), torch.float32, gpu, biases=True)
    with mr.float32(mode):
        explanation = explained(inputs)
        assert "/simt/" in explanation.forward and "excludes" in str(explanation)
        found = mr.mlp(**inputs)
    exact = reference.mlp(**{name: t.double() for name, t in inputs.items()})
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
