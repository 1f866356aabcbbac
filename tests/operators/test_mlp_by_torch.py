"""Wide float32 MLPs whose parts torch computes on a GPU: the ops on tensors of the CPU, and what decides."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import scaled_mlp_inputs
from specimens import LAYOUTS, Inputs
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops import mlp, mlp_by_torch
from monoidreduce._ops.mlp import ACTIVATIONS, MlpOpOptions

CPU = torch.device("cpu")
SIZES = {  # rows, hidden, width in, width out
    "narrowest": (300, 200, 136, 136),
    "one_row": (1, 520, 264, 264),
    "wide_in": (140, 328, 1032, 24),
    "wide_out": (270, 301, 7, 264),
    "odd": (301, 403, 259, 131),
}
PARTS = {  # sizes, the smallest part of the backward pass, and its bytes
    "units": ((300, 600, 264, 320), (300, 128), 2 * 4 * 300 * 128),  # the rows' gradient is the smaller one
    "rows": ((700, 200, 320, 264), (128, 200), 2 * 4 * 128 * 200),
}


class OnGpu(Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class OrdinaryCores:
    """`_C` on a GPU where no tensor-core kernel takes an MLP. Its kernels note their names and do nothing."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("plan"):
            plan = SimpleNamespace(
                planes=False, tensor_cores=False, part=None, scratch=0, adds_rows=True, computed=(True,) * 3
            )
            return lambda *_, **__: plan
        return lambda *_: self.ran.append(name)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> OrdinaryCores:
    """Calls of any size are torch's."""
    kernels = OrdinaryCores()
    monkeypatch.setattr(mlp_by_torch, "_FEWEST_TERMS", 0)
    monkeypatch.setattr(mlp, "_C", kernels)
    monkeypatch.setattr(mlp, "launch_on", lambda on: (1, 0))
    return kernels


class Mlp(torch.autograd.Function):
    """The op as it runs on a GPU, on tensors of the CPU."""

    @staticmethod
    def forward(ctx: Any, activation: str, workspace: int | None, *inputs: Tensor | None) -> Tensor:
        ctx.options, ctx.inputs = MlpOpOptions(activation, False, workspace), inputs
        return mlp.mlp_forward(*map(on_gpu, inputs), ctx.options).as_subclass(Tensor)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        inputs, needed = map(on_gpu, ctx.inputs), [*ctx.needs_input_grad[2:]]
        found = mlp.mlp_backward(on_gpu(grad_out), *inputs, ctx.options, needed)
        wanted = zip(found, needed, strict=True)
        return None, None, *(of.as_subclass(Tensor) if is_wanted else None for of, is_wanted in wanted)


def on_gpu(t: Tensor | None) -> Any:
    return None if t is None else t.as_subclass(OnGpu)


def call(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_tanh",
    workspace: int | None = None,
) -> Tensor:
    out: Tensor = Mlp.apply(activation, workspace, x, w1, w2, bias1, bias2)
    return out


def check(inputs: Inputs, cores: OrdinaryCores, activation: str, **options: Any) -> None:
    check_operator(
        "mlp",
        inputs,
        {"activation": activation},
        function=lambda **given: call(**given, workspace=options.get("workspace")),
        differentiate=options.get("differentiate"),
    )
    assert not cores.ran


def meta(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


def wide(rows: int, hidden: int, width: int, outputs: int) -> list[Tensor]:
    return meta((rows, width), (hidden, width), (outputs, hidden))


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, cores: OrdinaryCores) -> None:
    check(scaled_mlp_inputs(SIZES[size], torch.float32, CPU, biases), cores, "gelu_tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, cores: OrdinaryCores) -> None:
    check(scaled_mlp_inputs(SIZES["narrowest"], torch.float32, CPU, biases=True), cores, activation)


@pytest.mark.parametrize("tiles", (1, 2, 3))
@pytest.mark.parametrize("of", PARTS)
def test_parts(of: str, tiles: int, cores: OrdinaryCores) -> None:
    sizes, part, tile_bytes = PARTS[of]
    x, w1, w2 = wide(*sizes)
    assert mlp_by_torch.held_part(x, w1, w2, tile_bytes, backward=True) == part
    assert mlp_by_torch.held_part(x, w1, w2, tile_bytes - 1, backward=True) != part
    inputs = scaled_mlp_inputs(sizes, torch.float32, CPU, biases=True)
    check(inputs, cores, "silu", workspace=tiles * tile_bytes)


def test_a_part_is_of_rows_if_the_workspace_holds_no_units_of_all_rows() -> None:
    x, w1, w2 = wide(4096, 1 << 16, 256, 256)
    all_units = 128 * len(w1) * 8
    assert mlp_by_torch.held_part(x, w1, w2, all_units, backward=True) == (4096, 2048)
    x, w1, w2 = wide(1 << 17, 1 << 17, 256, 256)
    assert mlp_by_torch.held_part(x, w1, w2, 128 * len(x) * 8 - 1, backward=True) is None
    x, w1, w2 = wide(1 << 18, 1 << 17, 256, 600)  # the rows' gradient is the smaller one
    assert x.numel() <= w1.numel() + w2.numel()
    assert mlp_by_torch.held_part(x, w1, w2, 128 * len(w1) * 8, backward=True) == (128, 1 << 17)


@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1", "bias2"))
@pytest.mark.parametrize("activation", ("relu2", "gelu", "sigmoid"))
def test_one_gradient_alone(activation: str, name: str, cores: OrdinaryCores) -> None:
    sizes, _, tile_bytes = PARTS["units"]
    inputs = scaled_mlp_inputs(sizes, torch.float32, CPU, biases=True)
    check(inputs, cores, activation, workspace=2 * tile_bytes, differentiate=[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, cores: OrdinaryCores) -> None:
    """Results have the same bits whatever the strides are, but for the gradient of bias2, a sum by torch."""
    inputs = scaled_mlp_inputs(SIZES["odd"], torch.float32, CPU, biases=True)
    laid = {name: LAYOUTS[layout](t) for name, t in inputs.items()}
    grad = torch.randn(301, 131)

    def results(inputs: Inputs, grad: Tensor) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        out = call(**leaves)
        return [out.detach(), *torch.autograd.grad(out, [*leaves.values()][:-1], grad)]

    assert all(map(torch.equal, results(laid, LAYOUTS[layout](grad)), results(inputs, grad)))
    assert not cores.ran


@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_a_row_of_nan(activation: str, cores: OrdinaryCores) -> None:
    inputs = scaled_mlp_inputs(SIZES["odd"], torch.float32, CPU)
    inputs["x"][17, 3] = torch.nan
    check(inputs, cores, activation)
    assert call(**inputs, activation=activation).isfinite().all(1).sum() == 300


@pytest.mark.parametrize(
    "sizes", ((0, 200, 256, 256), (300, 0, 256, 256), (300, 200, 0, 256), (300, 200, 256, 0)), ids=str
)
def test_empty_sizes_are_left_to_kernels(sizes: tuple[int, int, int, int], cores: OrdinaryCores) -> None:
    call(*scaled_mlp_inputs(sizes, torch.float32, CPU).values())
    assert cores.ran == ["mlp_forward"]


# What decides


def paths(tensors: list[Tensor], hardware: str = "h100") -> tuple[str, str]:
    """The families of both passes."""
    found = mr.explain("mlp", *tensors, hardware=hardware)
    of_forward, of_backward = (
        path.removeprefix(f"mlp_{way}/cuda/").removesuffix("/float32")
        for way, path in (("forward", found.forward), ("backward", found.backward))
    )
    return of_forward, of_backward


@pytest.mark.parametrize("hardware", ("h100", "a100", "b200"))
@pytest.mark.parametrize("widths", ((136, 8), (8, 136), (129, 129), (4096, 4096)), ids=str)
def test_large_calls_are_torchs(widths: tuple[int, int], hardware: str) -> None:
    assert paths(wide(4096, 2048, *widths), hardware) == ("torch", "torch")
    explanation = mr.explain("mlp", *wide(4096, 2048, *widths), hardware=hardware)
    assert explanation.deterministic and explanation.workspace == mr.get_workspace()
    for way in ("forward", "backward"):
        assert (
            f"{way}: all matrix products and activations are torch's, in parts of 4096 of 4096 rows "
            "and 2048 of 2048 hidden units" in explanation.reasons
        )
    assert "nothing to fold" not in str(explanation)


def test_small_calls_take_kernels() -> None:
    """Large ones of any width are torch's, but for float64, and where the workspace holds no hidden value."""
    assert paths(wide(1024, 1024, 64, 64)) == ("simt", "simt")
    assert paths(wide(256, 1024, 256, 256)) == ("simt", "simt")
    assert paths(wide(64, 1024, 1024, 1024)) == ("torch", "torch")
    assert paths(wide(4096, 4096, 128, 16)) == ("torch", "torch")
    with mr.workspace(0):
        assert paths(wide(4096, 4096, 128, 16)) == ("simt", "simt")
    doubles = [t.double() for t in wide(4096, 2048, 256, 256)]
    assert mr.explain("mlp", *doubles, hardware="h100").forward == "mlp_forward/cuda/simt/float64"


def test_parts_are_explained() -> None:
    with mr.workspace(64 << 20):
        reasons = mr.explain("mlp", *wide(4096, 16384, 4096, 4096), hardware="h200").reasons
    of_forward, of_backward = (reason for reason in reasons if "are torch's" in reason)
    assert of_forward.endswith("in parts of 1024 of 4096 rows and 16384 of 16384 hidden units")
    assert of_backward.endswith("in parts of 4096 of 4096 rows and 2048 of 16384 hidden units")


def test_in_tf32_up_to_256_wide_kernels_multiply(tf32_allowed: None) -> None:
    assert paths(wide(4096, 2048, 256, 256)) == ("sm80", "sm80")
    assert paths(wide(4096, 2048, 264, 64)) == ("torch", "torch")


@pytest.mark.parametrize("mode", ("emulated", "simt"))
def test_a_mode_without_tf32_is_kept(mode: str, tf32_allowed: None) -> None:
    with mr.float32(mode):
        assert paths(wide(4096, 2048, 264, 264), "a100") == ("simt", "simt")
        reasons = str(mr.explain("mlp", *wide(4096, 2048, 264, 264), hardware="a100"))
        assert reasons.count("torch would multiply in tf32, which the mode of mr.float32 excludes") == 2
    torch.backends.cuda.matmul.allow_tf32 = False
    with mr.float32(mode):
        assert paths(wide(4096, 2048, 264, 264), "a100") == ("torch", "torch")


@pytest.fixture
def tf32_allowed() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_planes_come_first() -> None:
    with mr.float32("emulated"):
        assert paths(wide(4096, 2048, 264, 264)) == ("planes", "planes")
        assert paths(wide(63, 8192, 264, 264)) == ("torch", "torch")


@pytest.mark.parametrize(
    ("workspace", "expected"),
    (
        (4 * 128 * 2048 - 1, ("simt", "simt")),
        (4 * 128 * 2048, ("torch", "simt")),
        (8 * 128 * 2048, ("torch", "torch")),
    ),
)
def test_the_workspace_holds_a_part(workspace: int, expected: tuple[str, str]) -> None:
    tensors = wide(4096, 2048, 264, 264)
    with mr.workspace(workspace):
        assert paths(tensors) == expected
        text = str(mr.explain("mlp", *tensors, hardware="h100"))
    assert text.count("the workspace holds no part of the hidden values") == expected.count("simt")
    assert ("workspace     up to" in text) == ("torch" in expected)


@pytest.mark.parametrize(("setting", "family"), ((":4096:8", "torch"), (":16:8", "torch"), (None, "simt")))
def test_the_deterministic_mode(setting: str | None, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuBLAS's own setting torch's products would raise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    torch.use_deterministic_algorithms(True)
    try:
        of_forward, of_backward = paths(wide(4096, 2048, 264, 264))
        text = str(mr.explain("mlp", *wide(4096, 2048, 264, 264), hardware="h100"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert of_forward == family and of_backward.startswith(family)
    assert ("CUBLAS_WORKSPACE_CONFIG" in text) == (family == "simt")
