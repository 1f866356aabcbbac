"""What mr.explain says of copies that tensor-core kernels need; passes of mr.cost beside those that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops import engine
from monoidreduce.hardware import find_gpu
from monoidreduce.inspection import fold_of, resolved
from monoidreduce.theory.costs.modelled import modelled_run
from monoidreduce.theory.costs.sizes import call_of


def placed(shape: tuple[int, ...], pitch: int, device: torch.device, offset: int = 0) -> Tensor:
    """bfloat16, in lines of `pitch` elements that start `offset` elements into an allocation."""
    lines = torch.Size(shape[:-1]).numel()
    memory = torch.zeros(offset + lines * pitch, dtype=torch.bfloat16, device=device)
    return memory[offset:].view(*shape[:-1], pitch)[..., : shape[-1]]


def copied(operator: str, *tensors: Tensor, **options: Any) -> set[str]:
    explanation = mr.explain(operator, *tensors, **options)
    assert "/simt/" not in explanation.forward
    return {reason.split()[0] for reason in explanation.reasons if "is copied" in reason}


def peak(call: Callable[[], Tensor]) -> int:
    """Bytes that a call allocates at most."""
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.tiers("sm80", "sm90")
def test_copies_of_attention(gpu: torch.device) -> None:
    shape = (2, 4, 2048, 64)
    read, odd = placed(shape, 72, gpu), placed(shape, 67, gpu)
    shifted, by_tokens = placed(shape, 64, gpu, offset=1), placed((2, 2048, 4, 64), 64, gpu).transpose(1, 2)
    assert copied("attention", read, by_tokens, read) == set()
    assert copied("attention", odd, read, shifted) == {"q", "v"}
    assert copied("attention", read, read.mT.contiguous().mT, read) == {"k"}
    least = peak(lambda: mr.attention(read, read, read))
    assert peak(lambda: mr.attention(odd, read, shifted)) >= least + 2 * 2 * read.numel()


def test_copies_of_a_bias(gpu: torch.device) -> None:
    q = placed((1, 2, 256, 64), 64, gpu)
    assert copied("attention", q, q, q, bias=placed((1, 2, 256, 256), 256, gpu)) == set()
    assert copied("attention", q, q, q, bias=placed((1, 2, 256, 256), 257, gpu)) == {"bias"}


@pytest.mark.tiers("sm80", "sm90")
def test_copies_of_an_mlp(gpu: torch.device) -> None:
    x, w1, w2 = placed((512, 64), 64, gpu), placed((1024, 64), 72, gpu), placed((64, 1024), 1032, gpu)
    assert copied("mlp", x, w1, w2) == set()
    assert copied("mlp", placed((512, 64), 65, gpu), w1, w2.mT.contiguous().mT) == {"x", "w2"}
    assert copied("mlp", x, placed((1024, 64), 64, gpu, offset=1), w2) == {"w1"}


@pytest.mark.tiers("sm80", "sm90")
def test_padding(gpu: torch.device) -> None:
    q, k, v = (torch.zeros(1, 4, 256, width, dtype=torch.bfloat16, device=gpu) for width in (59, 59, 100))
    explanation = mr.explain("attention", q, k, v)
    assert "/simt/" not in explanation.forward + explanation.backward
    text = str(explanation)
    assert text.count("of width 64, padded from 59; of width 104, padded from 100") == 2
    x, w1, w2 = (
        torch.zeros(shape, dtype=torch.bfloat16, device=gpu) for shape in ((512, 59), (67, 59), (64, 67))
    )
    text = str(mr.explain("mlp", x, w1, w2))
    assert text.count("of width 64, padded from 59; of 72 hidden units, padded from 67") == 2
    assert "copied" not in text
    wide = torch.zeros(1, 4, 256, 257, dtype=torch.bfloat16, device=gpu)
    text = str(mr.explain("attention", wide, wide, wide))
    assert "/simt/" in text and "a width is 264, more than 256" in text and "padded" not in text


def noting(name: str, ran: list[str]) -> Callable[..., Any]:
    """The kernel of that name, which notes that it runs."""
    kernel = getattr(_C, name)

    def call(*arguments: Any, **options: Any) -> Any:
        ran.append(name)
        return kernel(*arguments, **options)

    return call


@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        ("attention", {"B": 1, "H": 4, "L": 1024, "d": 128}),
        ("attention", {"B": 1, "H": 4, "L": 1024, "d": 64, "causal": True}),
        ("attention", {"B": 1, "H": 4, "L": 512, "d": 256}),
        ("attention", {"B": 1, "H": 8, "Hkv": 2, "L": 1, "N": 4096, "d": 128}),
        ("linear_cross_entropy", {"N": 2048, "V": 32000, "D": 512}),
        ("linear_distillation", {"N": 1024, "V": 32000, "D": 512, "E": 256}),
        ("linear_log_probs", {"N": 1024, "V": 32000, "D": 512}),
        ("mlp", {"B": 4096, "K": 4096, "d": 128}),
        ("mlp", {"B": 4096, "K": 2048, "d": 512}),
        ("logsumexp_matmul", {"M": 8192, "N": 8192, "F": 64}),
        ("logsumexp_matmul", {"M": 2048, "N": 32000, "F": 512}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_passes_of_a_cost_are_those_that_run(
    operator: str,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name and in order. mr.explain tells their paths for this GPU and for tensors without memory."""
    entry = find_gpu(torch.cuda.get_device_name(gpu))
    if entry is None:
        pytest.skip("a GPU that monoidreduce.hardware does not have")
    described, options = call_of(operator, sizes, dtype)
    operands = (*fold_of(operator).operands.values(),)
    frozen = ("teacher_x", "teacher_weight")
    needed = tuple(name for name in operands if name not in frozen)
    names = [*resolved(operator, tuple(described), options)[1]]
    tensors = [
        torch.zeros_like(t, device=gpu).requires_grad_(name in needed)
        for name, t in zip(names, described, strict=False)
    ]
    ran: list[str] = []
    for name in _C.CALLS:
        # Of the class, for the backward pass has a thread of its own.
        monkeypatch.setattr(type(engine._C), name, staticmethod(noting(name, ran)))
    before = _C.path_counts()
    result = getattr(mr, operator)(*tensors, **options)
    (result.log_probs if operator == "linear_log_probs" else result).sum().backward()
    counted = {path for path, count in _C.path_counts().items() if count != before.get(path, 0)}

    noted = modelled_run(*resolved(operator, tuple(described), options), needed, entry.facts())
    assert ran == [launch.name for launch in noted.launches if launch.name in _C.CALLS]
    explained = mr.explain(operator, *described, hardware=entry.name, **options)
    assert counted == {path for path in (explained.forward, explained.backward) if "/torch/" not in path}
    assert mr.cost(operator, *tensors, **options) == mr.cost(
        operator, *described, hardware=entry.name, needed=needed, **options
    )
