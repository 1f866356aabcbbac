"""A launch that fails raises, names what failed, and leaves the next call alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from calls import assert_same_bits
from paths import explained, takes
from specimens import TENSOR_CORE_SPECIMENS, Specimen, name_of
from tolerance import as_outputs

import monoidreduce as mr
from monoidreduce._ops import mlp_by_torch

pytestmark = pytest.mark.tiers("sm80", "sm90")

RELAXED = 2  # a mode of captures in which nothing is forbidden to others


@contextmanager
def invalid_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """While this lasts, a launch on the stream fails: waiting for it made what it captures invalid."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    assert driver.cuStreamBeginCapture_v2(handle, RELAXED) == 0
    try:
        assert driver.cuStreamSynchronize(handle) != 0
        yield
    finally:
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_a_launch_that_fails(
    specimen: Specimen,
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Kernels of this library take large float32 MLPs, too: launches of torch's fail with other messages.
    monkeypatch.setattr(mlp_by_torch, "_FEWEST_TERMS", math.inf)
    inputs = specimen.inputs(dtype, gpu)
    path = explained(specimen, inputs).forward
    assert f"/cuda/{'simt' if dtype == torch.float32 else tier}/" in path

    def call() -> dict[str, torch.Tensor]:
        outputs = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
        return {f"out{i}": y for i, y in enumerate(outputs)}

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        expected, _ = call(), call()  # the second call leaves its memory to later calls
        stream.synchronize()
        named = r"^(launch of|cudaMemsetAsync for) \w+: cudaErrorStreamCaptureInvalidated, "
        with invalid_capture(stream), takes(set()), pytest.raises(RuntimeError, match=named):
            call()
        with takes({path}):
            got = call()
        stream.synchronize()
    assert_same_bits(got, expected)
