"""An MLP too wide for one kernel: hidden values come in parts, and torch multiplies them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls import (
    HALVES,
    assert_same_bits,
    check_captured,
    peak,
    reset_peak,
    results,
    scaled_mlp_inputs,
    upstreams,
)
from specimens import Inputs, Specimen, mlp_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

SIZES = {  # rows, hidden, width in, width out
    "one_tile": (128, 192, 512, 512),
    "one_row": (1, 520, 264, 264),
    "few_units": (300, 8, 512, 320),
    "ragged": (301, 1000, 520, 392),
    "narrow_in": (140, 328, 8, 512),
    "narrow_out": (77, 264, 512, 8),
    "long": (700, 3000, 320, 264),
    "many_rows": (3000, 72, 264, 264),
    "deep": (200, 456, 2056, 1032),
    "wide_tiles": (2000, 1500, 264, 264),
}
PARTS = {  # sizes, and the bytes of a tile of hidden values and derivatives
    "units": ((700, 600, 264, 320), 4 * 192 * 700),  # the rows' gradient is the smaller one
    "rows": ((1500, 200, 320, 264), 4 * 256 * 200),
}

pytestmark = pytest.mark.tiers("sm80", "sm90")


def launches(inputs: Inputs, tier: str, activation: str = "gelu_tanh") -> dict[str, int]:
    """Checks a call; returns how many launches it took forward and backward, of nothing but the tier."""
    before = mr._C.path_counts()
    check_operator("mlp", inputs, {"activation": activation})
    after = mr._C.path_counts()
    ran = {path: n - before.get(path, 0) for path, n in after.items() if n != before.get(path, 0)}
    suffix = f"/cuda/{tier}/{name_of(inputs['x'].dtype)}"
    assert ran.keys() == {f"mlp_forward{suffix}", f"mlp_backward{suffix}"}
    return {path.removeprefix("mlp_").removesuffix(suffix): n for path, n in ran.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    assert launches(scaled_mlp_inputs(SIZES[size], dtype, gpu, biases), tier) == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    launches(scaled_mlp_inputs(SIZES["ragged"], dtype, gpu, biases=True), tier, activation)


@pytest.mark.parametrize(
    "sizes", ((130, 1, 320, 264), (130, 67, 320, 264), (130, 72, 313, 264), (130, 67, 7, 301)), ids=str
)
def test_sizes_that_are_no_multiple_of_eight(
    sizes: tuple[int, int, int, int], gpu: torch.device, tier: str
) -> None:
    """Copies are padded."""
    assert launches(scaled_mlp_inputs(sizes, torch.bfloat16, gpu, biases=True), tier) == {
        "forward": 1,
        "backward": 1,
    }


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(
    ("of", "tiles", "forward", "backward"),
    (("units", 1, 3, 4), ("units", 2, 1, 2), ("rows", 1, 3, 6), ("rows", 2, 2, 3), ("rows", 3, 1, 2)),
)
def test_several_parts(
    of: str, tiles: int, forward: int, backward: int, dtype: torch.dtype, gpu: torch.device, tier: str
) -> None:
    """A workspace of so many tiles: some parts are as large as the last, some are not."""
    sizes, tile_bytes = PARTS[of]
    with mr.workspace(tiles * tile_bytes):
        ran = launches(scaled_mlp_inputs(sizes, dtype, gpu, biases=True), tier)
    assert ran == {"forward": forward, "backward": backward}


def test_a_workspace_that_holds_no_tile(gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS["rows"]
    inputs = scaled_mlp_inputs(sizes, torch.bfloat16, gpu)
    with mr.workspace(tile_bytes // 2 - 1):
        explanation = mr.explain("mlp", *inputs.values())
        launches(inputs, "simt")
    assert "/simt/" in explanation.forward and "/simt/" in explanation.backward
    assert "workspace" in str(explanation)


@pytest.mark.tiers("sm90")
def test_explained(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(PARTS["units"][0], torch.bfloat16, gpu)
    with mr.workspace(PARTS["units"][1]):
        explanation = mr.explain("mlp", *inputs.values())
    assert explanation.backward == "mlp_backward/cuda/sm90/bfloat16"
    assert explanation.deterministic and explanation.workspace == PARTS["units"][1]
    assert "parts of 700 rows and 192 hidden units" in str(explanation)
    narrow = scaled_mlp_inputs((700, 600, 64, 64), torch.bfloat16, gpu)
    assert mr.explain("mlp", *narrow.values()).workspace is None


@pytest.mark.tiers("sm90")
def test_few_hidden_units_of_many_rows(gpu: torch.device, tier: str) -> None:
    """The kernel that holds none would have a block for every 128 of them; it runs where no part is held."""
    inputs = scaled_mlp_inputs((9000, 264, 64, 72), torch.bfloat16, gpu, biases=True)
    assert launches(inputs, tier) == {"forward": 1, "backward": 1}
    call = [inputs[name] for name in ("x", "w1", "w2")]
    assert "264 hidden units are 3 blocks" in str(mr.explain("mlp", *call))
    with mr.workspace(0):
        assert launches(inputs, tier) == {"forward": 1, "backward": 1}
        assert "in parts" not in str(mr.explain("mlp", *call))


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize(("rows", "width"), ((1, 256), (130, 136), (700, 200)))
def test_few_rows_of_many_hidden_units(rows: int, width: int, gpu: torch.device, tier: str) -> None:
    """Rows of more than 128 features have a pass of their own, a block for every 128 of them."""
    inputs = scaled_mlp_inputs((rows, 4104, width, 72), torch.bfloat16, gpu, biases=True)
    assert launches(inputs, tier) == {"forward": 1, "backward": 1}
    call = [inputs[name] for name in ("x", "w1", "w2")]
    assert f"{rows} rows are {-(-rows // 128)} blocks" in str(mr.explain("mlp", *call))
    with mr.workspace(0):
        assert launches(inputs, tier) == {"forward": 1, "backward": 1}
        assert "in parts" not in str(mr.explain("mlp", *call))


@pytest.mark.tiers("sm90")
def test_few_rows_in_the_deterministic_mode(gpu: torch.device, deterministic: None, tier: str) -> None:
    """There rows of any width have a pass of their own."""
    inputs = scaled_mlp_inputs((130, 4104, 64, 72), torch.bfloat16, gpu, biases=True)
    assert launches(inputs, tier) == {"forward": 1, "backward": 1}
    assert "130 rows are 2 blocks" in str(mr.explain("mlp", *(inputs[name] for name in ("x", "w1", "w2"))))


def test_views(gpu: torch.device, tier: str) -> None:
    """Leading axes, transposed weights, odd pitches: copied where TMA cannot read them."""
    inputs = scaled_mlp_inputs((300, 1000, 520, 392), torch.bfloat16, gpu, biases=True)
    inputs["x"] = inputs["x"].reshape(3, 100, 520)
    inputs["w1"] = inputs["w1"].t().contiguous().t()
    inputs["w2"] = inputs["w2"].t().contiguous().t()
    launches(inputs, tier, "silu")
    odd = {name: torch.nn.functional.pad(t, (0, 3))[..., :-3] for name, t in inputs.items()}
    launches(odd, tier, "silu")


@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1", "bias2"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS["units"]
    inputs = scaled_mlp_inputs(sizes, torch.bfloat16, gpu, biases=True)
    with mr.workspace(2 * tile_bytes):
        check_operator("mlp", inputs, {"activation": "gelu"}, differentiate=[name])


def test_non_finite_inputs(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(SIZES["ragged"], torch.bfloat16, gpu)
    inputs["x"][17, 3] = torch.nan
    x = inputs["x"].requires_grad_()
    out = mr.mlp(**inputs)
    others = torch.arange(301, device=gpu) != 17
    assert out[17].isnan().all() and out[others].isfinite().all()
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert dx[17].isnan().all() and dx[others].isfinite().all()


def test_no_rows(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs((0, 512, 320, 264), torch.bfloat16, gpu, biases=True)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    out = mr.mlp(**leaves)
    assert out.shape == (0, 264)
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert not gradient.any()


@pytest.mark.parametrize("of", PARTS)
def test_the_same_bits_every_time(of: str, gpu: torch.device) -> None:
    sizes, tile_bytes = PARTS[of]
    inputs = scaled_mlp_inputs(sizes, torch.bfloat16, gpu, biases=True)
    call = Specimen("mlp", "mlp", mlp_inputs)
    grads = upstreams(call, inputs)
    with mr.workspace(tile_bytes):
        first = results(call, inputs, grads)
        for _ in range(3):
            assert_same_bits(results(call, inputs, grads), first)


def test_deterministic_mode(gpu: torch.device, deterministic: None, tier: str) -> None:
    with mr.workspace(PARTS["units"][1]):
        launches(scaled_mlp_inputs(PARTS["units"][0], torch.bfloat16, gpu, biases=True), tier)


@pytest.mark.tiers("sm90")
def test_deterministic_mode_that_torch_refuses(
    gpu: torch.device, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cuBLAS's own setting torch's products raise, and the SIMT kernels take the call."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    inputs = scaled_mlp_inputs(SIZES["one_tile"], torch.bfloat16, gpu)
    explanation = mr.explain("mlp", *inputs.values())
    assert "/simt/" in explanation.forward and "CUBLAS_WORKSPACE_CONFIG" in str(explanation)


def test_captured_in_a_graph(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(PARTS["units"][0], torch.bfloat16, gpu, biases=True)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grad = torch.randn(700, 320, dtype=torch.bfloat16, device=gpu)

    def step() -> tuple[torch.Tensor, ...]:
        with mr.workspace(PARTS["units"][1]):
            out = mr.mlp(**leaves)
            return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    check_captured(step)


@pytest.mark.tiers("sm90")
def test_in_a_new_thread(gpu: torch.device) -> None:
    """In which no CUDA call was made yet, as in autograd's in the first backward pass of a process."""
    inputs = scaled_mlp_inputs(SIZES["ragged"], torch.bfloat16, gpu)
    expected = mr.mlp(**inputs)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(mr.mlp, **inputs).result(), expected)


@pytest.mark.tiers("sm90")
def test_under_autocast(gpu: torch.device) -> None:
    """float32 inputs, as of a model in training; the products are of what autocast made of them."""
    inputs = scaled_mlp_inputs(SIZES["ragged"], torch.float32, gpu, biases=True)
    before = mr._C.path_counts()
    with torch.autocast("cuda", torch.bfloat16):
        out = mr.mlp(**inputs)
    ran = {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}
    assert ran == {"mlp_forward/cuda/sm90/bfloat16"}
    expected = mr.mlp(**{name: t.bfloat16() for name, t in inputs.items()})
    assert torch.equal(out, expected)


@pytest.mark.tiers("sm90")
def test_the_hidden_is_never_stored_whole(gpu: torch.device) -> None:
    rows, hidden, width = 4096, 16384, 512
    inputs = scaled_mlp_inputs((rows, hidden, width, width), torch.bfloat16, gpu)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grad = torch.randn(rows, width, dtype=torch.bfloat16, device=gpu)
    workspace = 16 << 20
    assert workspace < 2 * rows * hidden
    torch.autograd.grad(mr.mlp(**leaves), list(leaves.values()), grad)  # cuBLAS's own workspace stays
    with mr.workspace(workspace):
        before = reset_peak()
        out = mr.mlp(**leaves)
        assert peak() - before <= 2 * out.numel() + workspace + (1 << 18)
        before = reset_peak()
        torch.autograd.grad(out, list(leaves.values()), grad)
        gradients = 2 * sum(t.numel() for t in leaves.values())
        summed = 4 * rows * width
        assert peak() - before <= gradients + summed + workspace + (1 << 20)


@pytest.mark.tiers("sm90")
def test_few_rows_and_hidden_units(gpu: torch.device, tier: str) -> None:
    """Both passes of rows above 128 features wide would have a block for every 128 of them."""
    inputs = scaled_mlp_inputs((2100, 2000, 200, 72), torch.bfloat16, gpu, biases=True)
    assert launches(inputs, tier) == {"forward": 1, "backward": 1}
    call = [inputs[name] for name in ("x", "w1", "w2")]
    assert "2100 rows and 2000 hidden units are few blocks" in str(mr.explain("mlp", *call))


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("sizes", ((1024, 264, 64, 72), (1100, 2800, 120, 128)), ids=str)
def test_few_hidden_units_of_some_rows(
    sizes: tuple[int, int, int, int], gpu: torch.device, tier: str
) -> None:
    """A block of the kernel for all gradients would go through all rows."""
    inputs = scaled_mlp_inputs(sizes, torch.bfloat16, gpu, biases=True)
    assert launches(inputs, tier)["backward"] == 1
    call = [inputs[name] for name in ("x", "w1", "w2")]
    assert f"{sizes[1]} hidden units are {-(-sizes[1] // 128)} blocks" in str(mr.explain("mlp", *call))
    fewer = [inputs["x"][:1000], *call[1:]]
    assert "blocks for" not in str(mr.explain("mlp", *fewer))
