"""Copies padded with zeros for the tensor cores, and results that are cut: against torch's own copies."""

import pytest
import torch
from calls import HALVES
from specimens import name_of
from torch import Tensor

from monoidreduce._ops import memory


def expected(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.zeros(shape, dtype=dtype, device=t.device)
    both = tuple(slice(min(sizes)) for sizes in zip(t.shape, shape, strict=True))
    out[both] = t[both].to(dtype)
    return out


@pytest.mark.parametrize("to", [*HALVES, torch.float32], ids=name_of)
@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact"])
def test_padded_and_cut(exact: bool, to: torch.dtype, gpu: torch.device) -> None:
    dtype = to if exact else torch.float32
    for source, shape in (
        (torch.randn(2, 3, 133, 59, device=gpu), (2, 3, 133, 64)),
        (torch.randn(2, 133, 3, 59, device=gpu).transpose(1, 2), (2, 3, 133, 64)),
        (torch.randn(2, 3, 133, 264, device=gpu), (2, 3, 133, 259)),
        (torch.randn(1, 1, 40, 8, device=gpu).expand(2, 3, 40, 8), (2, 3, 40, 1)),
        (torch.randn(67, 59, device=gpu), (72, 64)),
        (torch.randn(59, 67, device=gpu).mT, (72, 64)),
        (torch.randn(72, 64, device=gpu), (67, 59)),
        (torch.randn(7, device=gpu), (8,)),
        (torch.randn(50, 3, 5, 2, device=gpu), (50, 3, 5, 1)),  # a chunk takes in several matrices
        (torch.randn(5, 2, 1, 3, device=gpu), (5, 2, 1, 8)),
        (torch.randn(3, 20011, device=gpu), (3, 20016)),
        (torch.randn(0, 7, device=gpu), (0, 8)),
    ):
        t = source.to(dtype)
        t[..., :1] = torch.nan  # the bits of what is not finite are kept, and reach no other element
        found = memory.copy_fitted(t, torch.full(shape, 7.0, dtype=to, device=gpu))
        torch.testing.assert_close(found, expected(t, shape, to), rtol=0, atol=0, equal_nan=True)


def test_more_than_2_to_the_31_elements(gpu: torch.device) -> None:
    t = torch.zeros(1, 1, (1 << 31) // 56 + 3, 57, dtype=torch.float16, device=gpu)
    t[..., -1, :] = 3.0
    found = memory.copy_fitted(t, t.new_empty((*t.shape[:-1], 64)))
    assert (found[0, 0, -1, :57] == 3).all() and found.count_nonzero() == 57


def test_strided_target(gpu: torch.device) -> None:
    t, whole = torch.randn(3, 5, 6, device=gpu), torch.ones(5, 3, 16, device=gpu)
    memory.copy_fitted(t, whole.transpose(0, 1)[..., ::2])
    assert torch.equal(whole[..., ::2], expected(t.transpose(0, 1), (5, 3, 8), torch.float32))
    assert (whole[..., 1::2] == 1).all()
