"""`mr.block_mask`: sizes of 0, blocks larger than all, numbers of numpy, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import monoidreduce as mr


def before(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i) & (h >= 0)


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "columns"),
    [(0, 2, 5, 6), (2, 0, 5, 6), (2, 2, 0, 6), (2, 2, 5, 0), (0, 0, 0, 0), (2, 2, 5, 6)],
)
@pytest.mark.parametrize("alike", (False, True), ids=("own", "alike"))
def test_sizes_of_0(batch: int, heads: int, rows: int, columns: int, alike: bool) -> None:
    """Attention under the mask is as under mask_mod: empty, or of no key."""
    mask = mr.block_mask(before, *((None, None) if alike else (batch, heads)), rows, columns, block_size=4)
    assert mask.kinds.shape[2:] == (-(-rows // 4), -(-columns // 4)) and "kept" in repr(mask)
    q = torch.randn(batch, heads, rows, 3, requires_grad=True)
    k, v = (torch.randn(batch, heads, columns, 3, requires_grad=True) for _ in range(2))
    out, lse = mr.attention(q, k, v, block_mask=mask, return_lse=True)
    if rows and columns:
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, torch.ones(rows, columns, dtype=torch.bool).tril()
        )
        torch.testing.assert_close(out, expected)
    else:
        assert not out.any() and (lse == -math.inf).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.shape == t.shape and g.isfinite().all() for g, t in zip(gradients, (q, k, v), strict=True))


def test_no_rows_of_a_mask_with_a_tensor_are_where_it_is() -> None:
    table = torch.ones(6, dtype=torch.bool, device="meta")
    mask = mr.block_mask(lambda b, h, i, j: table[j], 1, 1, 0, 6)
    assert mask.kinds.device.type == "meta" and "kept" in repr(mask)


@pytest.mark.parametrize(
    "size",
    [
        np.int64(4),
        np.array(4),
        torch.tensor(4),
        (np.int32(4), 4),
        [4, 4],
        np.array([4, 4]),
        torch.tensor([4, 4]),
        torch.Size([4, 4]),
    ],
)
def test_any_ints_are_a_block_size(size: Any) -> None:
    mask = mr.block_mask(before, np.int64(2), torch.tensor(2), np.int16(9), torch.tensor(10), block_size=size)
    expected = mr.block_mask(before, 2, 2, 9, 10, block_size=4)
    assert mask.block == (4, 4) and mask.lengths == (9, 10) and torch.equal(mask.kinds, expected.kinds)
    assert all(type(n) is int for n in (*mask.block, *mask.lengths))


@pytest.mark.parametrize("size", (128, 1 << 20, 1 << 31))
def test_a_block_that_has_all(size: int) -> None:
    """It takes no more memory than the mask has elements."""
    mask = mr.block_mask(before, 1, 1, 5, 6, block_size=size)
    assert mask.kinds.tolist() == [[[[1]]]] and mask.block == (size, size)
    q, k = torch.randn(1, 1, 5, 3), torch.randn(1, 1, 6, 3)
    torch.testing.assert_close(mr.attention(q, k, k, block_mask=mask), mr.attention(q, k, k, mask_mod=before))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"B": -1}, ValueError, "B: expected an int >= 0, got -1"),
        ({"H": 1.0}, TypeError, "H: expected None or an int >= 0, got 1.0"),
        ({"M": None}, TypeError, "M: expected an int >= 0, got None"),
        ({"N": True}, TypeError, "N: expected an int >= 0, got True"),
        *(
            ({"block_size": size}, error, "block_size: expected an int from 1 to 2\\^31, or two, got ")
            for size, error in (
                (None, TypeError),
                ((4, None), TypeError),
                (4.0, TypeError),
                (True, TypeError),
                ("4", TypeError),
                ((4, True), TypeError),
                (0, ValueError),
                ((4, -4), ValueError),
                ((4,), ValueError),
                ((4, 4, 4), ValueError),
                (10**30, ValueError),
            )
        ),
        ({"mask_mod": None}, TypeError, "mask_mod: expected a function .*, got None of type NoneType"),
        ({"mask_mod": torch.ones(3)}, TypeError, "mask_mod: expected a function .* of type Tensor"),
        ({"device": "nope"}, ValueError, "device: expected None or a device of torch, got 'nope'"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"mask_mod": before, "B": 1, "H": 1, "M": 5, "N": 6, **changes}
    with pytest.raises(error, match=f"^{message}"):
        mr.block_mask(**arguments)
