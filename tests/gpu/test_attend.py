"""attend on a GPU: sums of weights, against dense torch in float64, and in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls import HALVES
from modified_calls import RAGGED, SHAPES, operands
from mods import dense
from paths import counts
from specimens import name_of
from tolerance import accuracy_failures, upstream_gradient
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")
SIMT = pytest.mark.tiers("simt")
WIDE = (torch.float32, torch.float64)
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": lambda s: torch.sigmoid(s - 2.0),
    "relu2": lambda s: torch.relu(s) ** 2,
    "power": lambda s: s**4,
    "negative": lambda s: 1.0 + torch.tanh(s) - 0.5 * s,  # not 0 where a column is beyond the last
    "exp": lambda s: torch.exp(s - 1.0),
}


def of_torch(weight: Any, mask_mod: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
    """Scores and weights in float32 or more, weights rounded before they multiply values."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def of(score: Tensor) -> Tensor:
            wide = score if score.dtype == torch.float64 else score.float()
            return weight(wide).to(score.dtype)

        return dense(q, k, v, None, mask_mod, weight=of, **options)[0]

    return call


def check(
    weight: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gpu: torch.device,
    mask_mod: Any = None,
    blocked: bool = False,
    **options: Any,
) -> None:
    B, H, _, M, N, *_ = shape
    leaves = operands(shape, dtype, gpu)
    masks: dict[str, Any] = {"mask_mod": mask_mod}
    if blocked:
        masks = {"block_mask": mr.block_mask(mask_mod, B, H, M, N, device=gpu, block_size=64)}
    before = mr._C.path_counts()
    out = mr.attend(*leaves, weight=weight, **masks, **options)
    upstream = upstream_gradient(out)
    found = [out, *torch.autograd.grad(out, leaves, upstream)]
    after = mr._C.path_counts()
    taken = {path.split("/")[0] for path in after if after[path] > before.get(path, 0)}
    assert {"modified_attention_forward", "modified_attention_backward"} <= taken

    composed = of_torch(weight, mask_mod, options)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = composed(*wide)
    truth = [exact, *torch.autograd.grad(exact, wide, upstream.double())]
    base = composed(*leaves)
    bases = [base, *torch.autograd.grad(base, leaves, upstream)]
    failures: list[str] = []
    for name, y, ref, torchs in zip(("out", "d_q", "d_k", "d_v"), found, truth, bases, strict=True):
        failures += accuracy_failures(name, y, ref, torchs, dtype, max(M, N))
    assert not failures, "\n".join(failures)


def of_indices(score: Any, q_idx: Any, kv_idx: Any, head: Any) -> Any:
    return torch.sigmoid(score - 2**-5 * (head + 1) * (q_idx - kv_idx).abs())  # exact in float32 too


def check_of_indices(dtype: torch.dtype, gpu: torch.device) -> None:
    _, H, _, M, N, *_ = SHAPES[0]
    head, q_idx, kv_idx = (torch.arange(n, device=gpu) for n in (H, M, N))
    given = q_idx[:, None], kv_idx, head[:, None, None]
    leaves, composed = operands(SHAPES[0], dtype, gpu), of_torch(lambda s: of_indices(s, *given), None, {})
    out = mr.attend(*leaves, weight=of_indices)
    upstream = upstream_gradient(out)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    results = [(out, leaves), (composed(*wide), wide), (composed(*leaves), leaves)]
    found = [(y, *torch.autograd.grad(y, of, upstream.to(y.dtype))) for y, of in results]
    failures: list[str] = []
    for name, *of in zip(("out", "d_q", "d_k", "d_v"), *found, strict=True):
        failures += accuracy_failures(name, *of, dtype, max(M, N))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_weights_of_indices(dtype: torch.dtype, gpu: torch.device) -> None:
    check_of_indices(dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
def test_weights_of_indices_on_simt(dtype: torch.dtype, gpu: torch.device) -> None:
    check_of_indices(dtype, gpu)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(WEIGHTS[name], SHAPES[0], dtype, gpu)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ("sigmoid", "negative"))
def test_widths(name: str, shape: tuple[int, ...], gpu: torch.device) -> None:
    check(WEIGHTS[name], shape, torch.bfloat16, gpu)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
def test_bands(options: dict[str, Any], gpu: torch.device) -> None:
    check(WEIGHTS["negative"], SHAPES[0], torch.float16, gpu, **options)


@pytest.mark.parametrize("blocked", (False, True))
def test_masks(blocked: bool, gpu: torch.device) -> None:
    """Of elements, and of whole blocks that are skipped, one head keeping nothing."""
    mask = lambda b, h, i, j: ((i // 64 - j // 64) % 3 == 1) & (h != 1) & ((i + j) % 7 != 0)  # noqa: E731
    check(WEIGHTS["negative"], SHAPES[0], torch.bfloat16, gpu, mask, blocked)
    check(WEIGHTS["sigmoid"], (1, 4, 1, 700, 900, 128, 128), torch.bfloat16, gpu, mask, blocked, causal=True)


def test_normalized(gpu: torch.device) -> None:
    check(WEIGHTS["relu2"], SHAPES[0], torch.bfloat16, gpu, normalized=True, causal=True)


def test_deterministic(deterministic: None, gpu: torch.device) -> None:
    """Two runs give the same bits, and right ones."""
    leaves = operands((2, 4, 2, 500, 700, 128, 128), torch.bfloat16, gpu)
    upstream = torch.randn(2, 4, 500, 128, device=gpu, dtype=torch.bfloat16)
    call = partial(mr.attend, weight=WEIGHTS["sigmoid"])
    first, second = (torch.autograd.grad(call(*leaves), leaves, upstream) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    check(WEIGHTS["sigmoid"], SHAPES[0], torch.bfloat16, gpu)


def test_gradient_by_a_captured_tensor(gpu: torch.device) -> None:
    """Of a number, in 8 draws together: the error of one number is luck."""
    draws = []
    for seed in range(8):
        torch.manual_seed(seed)
        leaves = [t.detach() for t in operands(SHAPES[0], torch.bfloat16, gpu)]
        shift = torch.randn((), device=gpu, requires_grad=True)
        exact = shift.detach().double().requires_grad_()
        outs = (
            mr.attend(*leaves, weight=lambda s, by=shift: torch.sigmoid(s + by)),
            of_torch(lambda s, by=exact: torch.sigmoid(s + by), None, {})(*(t.double() for t in leaves)),
            of_torch(lambda s, by=shift: torch.sigmoid(s + by), None, {})(*leaves),
        )
        upstream = upstream_gradient(outs[0])
        draws += [
            torch.autograd.grad(out, by, upstream.to(out.dtype))[0]
            for out, by in zip(outs, (shift, exact, shift), strict=True)
        ]
    found, truth, base = (torch.stack(draws[first::3]) for first in range(3))
    failures = accuracy_failures("d_shift", found, truth, base, torch.bfloat16, 333)
    assert not failures, "\n".join(failures)


def test_no_key(gpu: torch.device) -> None:
    leaves = operands((1, 2, 1, 3, 0, 8, 8), torch.bfloat16, gpu)
    out = mr.attend(*leaves, weight=torch.sigmoid)
    assert torch.equal(out, torch.zeros_like(out))


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_on_simt(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(WEIGHTS[name], SHAPES[0], dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", (*WIDE, *HALVES), ids=name_of)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_any_width(shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device) -> None:
    check(WEIGHTS["negative"], shape, dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("blocked", (False, True))
def test_masks_on_simt(blocked: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    mask = lambda b, h, i, j: ((i // 64 - j // 64) % 3 == 1) & (h != 1) & ((i + j) % 7 != 0)  # noqa: E731
    check(WEIGHTS["negative"], (2, 4, 2, 200, 333, 20, 12), dtype, gpu, mask, blocked, causal=True)


@SIMT
@pytest.mark.parametrize("dtype", (*WIDE, torch.bfloat16), ids=name_of)
def test_normalized_on_simt(dtype: torch.dtype, gpu: torch.device) -> None:
    check(WEIGHTS["relu2"], (2, 4, 2, 200, 333, 20, 12), dtype, gpu, normalized=True, causal=True)


@SIMT
def test_deterministic_on_simt(deterministic: None, gpu: torch.device) -> None:
    """Two runs give the same bits, and right ones."""
    leaves = operands(RAGGED[3], torch.float32, gpu)
    upstream = torch.randn(2, 4, 130, 64, device=gpu)
    call = partial(mr.attend, weight=WEIGHTS["sigmoid"])
    first, second = (torch.autograd.grad(call(*leaves), leaves, upstream) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    check(WEIGHTS["sigmoid"], RAGGED[3], torch.float32, gpu)


def test_what_tensor_cores_do_not_take(gpu: torch.device) -> None:
    """SIMT kernels take it, whatever other calls take."""
    leaves = operands(SHAPES[0], torch.float32, gpu)
    before = counts()
    mr.attend(*leaves, weight=torch.sigmoid).sum().backward()
    assert set(counts() - before) == {
        f"modified_attention_{each}/cuda/simt/float32" for each in ("forward", "backward")
    }


def test_graph(deterministic: None, gpu: torch.device) -> None:
    """A CUDA graph of a step replays it on new inputs."""
    leaves = operands(SHAPES[0], torch.bfloat16, gpu)
    upstream = torch.randn(2, 4, 200, 64, device=gpu, dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        out = mr.attend(*leaves, weight=WEIGHTS["relu2"])
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        leaves[0].normal_()
    graph.replay()
    for replayed, expected in zip(found, step(), strict=True):
        assert torch.equal(replayed, expected)
