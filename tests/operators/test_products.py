"""Products by torch that are rounded once: torch's setting for the parts of a split product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends.cuda import matmul

from monoidreduce._ops.products import _ROUNDED_ONCE

SETTINGS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = {name: getattr(matmul, name) for name in SETTINGS.values()}
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.mark.parametrize("allowed", (True, False))
@pytest.mark.parametrize("dtype", SETTINGS, ids=str)
def test_the_setting_is_restored(dtype: torch.dtype, allowed: bool) -> None:
    """Also where products overlap, as those of two threads, and after an error."""
    setattr(matmul, SETTINGS[dtype], allowed)
    others = {name: getattr(matmul, name) for of, name in SETTINGS.items() if of != dtype}
    context = _ROUNDED_ONCE[dtype]

    def setting() -> bool:
        assert all(getattr(matmul, name) == value for name, value in others.items())
        found: bool = getattr(matmul, SETTINGS[dtype])
        return found

    with context:
        assert not setting()
        with context:
            assert not setting()
        assert not setting()
    assert setting() == allowed
    context.__enter__()
    context.__enter__()
    context.__exit__()  # the first thread's
    assert not setting()
    context.__exit__()
    assert setting() == allowed
    with pytest.raises(ValueError, match="of a product"), context:
        raise ValueError("of a product")
    assert setting() == allowed
