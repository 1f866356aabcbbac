"""What mr.explain says of copies that tensor-core kernels need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr


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
