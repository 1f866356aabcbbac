"""Sizes that are no multiple of 8: tensor cores are given copies padded with zeros, and results are cut back.

The code of `_ops` for a GPU runs here on the kernels of the CPU. Tensors say that they are on a GPU, and
tiers that they are of tensor cores. What the kernels of a GPU make of padding, tests/gpu tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specimens import Inputs, attention_inputs, mlp_inputs
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops import attention, attention_scores, memory, mlp, mlp_parts


class OnGpu(Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class TensorCores:
    """The kernels of the CPU, as a tier of tensor cores."""

    def __init__(self, part: tuple[int, int] | None = None) -> None:
        computed = (True, True, True)
        self.plan = SimpleNamespace(
            planes=False,
            tensor_cores=True,
            bias_in_tiles=True,
            adds_rows=True,
            computed=computed,
            scratch=0,
            part=part,
        )
        self.shapes: list[tuple[int, ...]] = []  # of all that the kernels were given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("plan"):
            return lambda *_, **options: self.plan
        return lambda *arguments: self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[Any, ...]) -> None:
        plain = [t.as_subclass(Tensor) if isinstance(t, Tensor) else t for t in arguments]
        if name == "attention_backward":  # which reads outputs of any width, as 0 behind a row
            fields = [field.name for field in _C.CALLS[name]]
            width = plain[fields.index("v")].shape[3]
            for i in (fields.index(field) for field in ("out", "out_low")):
                if plain[i] is not None:
                    plain[i] = fit(plain[i], plain[i].new_empty(*plain[i].shape[:3], width))
        self.shapes += [tuple(t.shape) for t in plain if isinstance(t, Tensor)]
        getattr(_C, name)(*(None if t is self.plan else t for t in plain))


def fit(t: Tensor, out: Tensor) -> Tensor:
    """As memory.copy_fitted does it on a GPU."""
    both = tuple(slice(min(sizes)) for sizes in zip(t.shape, out.shape, strict=True))
    out.zero_()[both].copy_(t[both])
    return out


@pytest.fixture(autouse=True)
def fit_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "copy_fitted", fit)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> TensorCores:
    kernels = TensorCores()
    for module in (attention_scores, mlp):
        monkeypatch.setattr(module, "_C", kernels)
        monkeypatch.setattr(module, "launch_on", lambda on: (1, 0))
    return kernels


def test_padding_is_zeros_behind_the_values() -> None:
    for t, axes, padded in (
        (torch.randn(3, 59), 1, (3, 64)),
        (torch.randn(2, 3, 5, 1), 1, (2, 3, 5, 8)),
        (torch.randn(5, 3, 2, 59).transpose(0, 2), 1, (2, 3, 5, 64)),
        (torch.randn(3, 59), 2, (8, 64)),
        (torch.randn(64, 3).mT, 2, (8, 64)),
        (torch.randn(59).expand(8, 59), 2, (8, 64)),
        (torch.randn(7), 1, (8,)),
        (torch.randn(0, 7), 1, (0, 8)),
    ):
        shape, found = t.shape, memory.padded(t, axes)
        assert found.shape == padded and found.is_contiguous()
        inner = found[tuple(slice(size) for size in shape)]
        assert torch.equal(inner, t) and found.count_nonzero() == t.count_nonzero()
    whole = torch.randn(8, 16)
    assert memory.padded(whole) is whole and memory.padded(whole, 2) is whole


def test_gradients_are_cut_and_rounded() -> None:
    wide, t = torch.randn(2, 3, 16), torch.empty(2, 3, 11, dtype=torch.bfloat16)
    (found,) = memory.rounded_gradients([wide], [t], [True])
    assert found.is_contiguous() and torch.equal(found, wide[..., :11].to(torch.bfloat16))
    assert memory.rounded_gradients([t, None, t], [t, t, t], [True, True, False])[0] is t


def on_gpu(inputs: Inputs) -> dict[str, Tensor]:
    return {name: t.as_subclass(OnGpu) for name, t in inputs.items()}


def assert_as_unpadded(found: list[Tensor], expected: list[Tensor], kernels: TensorCores) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.is_contiguous() and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.as_subclass(Tensor), theirs, rtol=1e-9, atol=1e-9)
    assert kernels.shapes


@pytest.mark.parametrize("widths", ((59, 59), (1, 7), (7, 64), (64, 7), (100, 250)), ids=str)
@pytest.mark.parametrize("kind", ("plain", "bias", "one_row", "lse_alone"))
def test_attention(kind: str, widths: tuple[int, int], tensor_cores: TensorCores) -> None:
    """With the scale of the width that it has; a bias has the keys' number of columns, whatever that is."""
    rows = 1 if kind == "one_row" else 13
    inputs = attention_inputs(
        2, 4, 2, rows, 21, *widths, dtype=torch.float64, device=torch.device("cpu"),
        bias=(4, 1, 21) if kind == "bias" else None,
    )  # fmt: skip
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    bias = inputs.get("bias")
    options = attention.AttentionOpOptions(None, 0.0, 8, 2, False)
    needed = [True, True, True, bias is not None, False]

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, lse, *low = attention.attention_forward(q, k, v, bias, None, options)
        grad_lse = torch.ones_like(lse.as_subclass(Tensor))
        grad_out = (
            None if kind == "lse_alone" else torch.linspace(-1, 1, out.numel()).double().view(out.shape)
        )
        if isinstance(q, OnGpu) and grad_out is not None:
            grad_out = grad_out.as_subclass(OnGpu)
        found = attention.attention_backward(
            grad_out, grad_lse, q, k, v, bias, None, out, lse, *low, options, needed
        )
        return [out, lse, *found]

    found = run(*(t.as_subclass(OnGpu) for t in (q, k, v)))
    assert all(shape[-1] % 8 == 0 for shape in tensor_cores.shapes if len(shape) == 4 and shape[-1] != 21)
    shapes, tensor_cores.shapes = tensor_cores.shapes, []
    assert_as_unpadded(found, run(q, k, v), tensor_cores)
    assert shapes != tensor_cores.shapes


@pytest.mark.parametrize(
    "sizes", ((59, 100, 64), (64, 67, 64), (7, 1, 1), (64, 64, 3), (100, 250, 59)), ids=str
)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
def test_mlp(biases: bool, sizes: tuple[int, int, int], tensor_cores: TensorCores) -> None:
    """The sigmoid of a padded hidden unit is 1/2: its second weight is 0."""
    inputs = mlp_inputs(
        13, *sizes, dtype=torch.float64, device=torch.device("cpu"), bias1=biases, bias2=biases
    )
    grad = torch.linspace(-1, 1, 13 * sizes[2]).double().view(13, sizes[2])
    needed = [True, True, True, biases, biases]

    def run(grad: Tensor, x: Tensor, w1: Tensor, w2: Tensor, *both: Tensor) -> list[Tensor]:
        options = mlp.MlpOpOptions("sigmoid", False, None)
        call = (x, w1, w2, *(both or (None, None)), options)
        return [mlp.mlp_forward(*call), *mlp.mlp_backward(grad, *call, needed)]

    found = run(grad.as_subclass(OnGpu), *on_gpu(inputs).values())
    assert all(size % 8 == 0 for shape in tensor_cores.shapes for size in shape if size != 13)
    shapes, tensor_cores.shapes = tensor_cores.shapes, []
    assert_as_unpadded(found, run(grad, *inputs.values()), tensor_cores)
    assert shapes != tensor_cores.shapes


@pytest.mark.parametrize("part", ((13, 8), (5, 72)), ids=("units", "rows"))
def test_mlp_in_parts(
    part: tuple[int, int], tensor_cores: TensorCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part takes its hidden units from the padded weights."""
    inputs = mlp_inputs(
        13, 59, 67, 33, dtype=torch.float32, device=torch.device("cpu"), bias1=True, bias2=True
    )
    grad, kinds = torch.randn(13, 33), mlp.ACTIVATIONS

    def hidden(
        x: Tensor,
        w1: Tensor,
        bias1: Tensor,
        out: Tensor,
        row_planes: None,
        column_planes: None,
        kind: int,
        *_: Any,
    ) -> None:
        assert kinds[kind] == "sigmoid" and all(size % 8 == 0 for size in (*w1.shape, *bias1.shape))
        out.copy_((x @ w1.T + bias1).sigmoid())

    def local(x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor, grad: Tensor, *rest: Any) -> None:
        out, values, sums, *planes, kind = rest[:8]
        assert planes == [None] * 4
        hidden(x, w1, bias1, values, None, None, kind)
        out.copy_((grad @ w2) * values * (1 - values))
        sums.zero_()
        sums[0, : out.shape[1]] = out.sum(0)

    def write_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        out.copy_(a @ b if bias is None else a @ b + bias)

    def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
        total.copy_(a @ b) if first else total.add_(a @ b)

    # Hidden values have all rows in one part or all units, forward the latter.
    tensor_cores.plan.part = (part[0], 72)
    monkeypatch.setattr(mlp_parts, "add_product", add_product)  # torch has one for GPUs
    monkeypatch.setattr(mlp_parts, "write_product", write_product)
    for name, kernel in (("mlp_hidden", hidden), ("mlp_local_gradient", local)):
        monkeypatch.setattr(tensor_cores, name, kernel, raising=False)
    options = mlp.MlpOpOptions("sigmoid", False, None)
    call, of_gpu = (*inputs.values(), options), (*on_gpu(inputs).values(), options)
    out = mlp.mlp_forward(*of_gpu)
    tensor_cores.plan.part = part
    found = [out, *mlp.mlp_backward(grad.as_subclass(OnGpu), *of_gpu, [True] * 5)]
    expected = [mlp.mlp_forward(*call), *mlp.mlp_backward(grad, *call, [True] * 5)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.as_subclass(Tensor), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64, torch.bool))
def test_words_are_of_tensors_that_are_made_of_them(dtype: torch.dtype) -> None:
    whole = torch.randn(3, 5, 64).to(dtype)
    for t in (whole, whole.transpose(0, 1), whole[1:, 2:4, 16:48]):
        words = memory.in_16_byte_words(t)
        assert words.dtype == torch.complex128 and words.numel() == t.numel() * t.element_size() // 16
        copy = memory.contiguous(t)
        assert copy.is_contiguous() and torch.equal(copy, t)
    odd = (
        whole[..., 1:33],
        whole[..., :33],
        whole.transpose(1, 2),
        whole[:0],
        whole[0, 0, 0],
        whole[..., ::2],
    )
    for t in odd:
        assert memory.in_16_byte_words(t) is t and torch.equal(memory.contiguous(t), t)
    assert memory.contiguous(whole) is whole
