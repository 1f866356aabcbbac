"""Which kernels a GPU runs, and that a call starts no more than these."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from calls import results, upstreams
from specimens import DTYPES, SPECIMENS, Specimen, name_of
from tolerance import kernels_of

import monoidreduce as mr

KERNEL_SPECIMENS = [specimen for specimen in SPECIMENS if kernels_of(specimen.operator)]


def launched(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> Counter[str]:
    inputs = specimen.inputs(dtype, device)
    grads = upstreams(specimen, inputs)
    before = Counter(mr._C.path_counts())
    results(specimen, inputs, grads)
    return Counter(mr._C.path_counts()) - before


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("specimen", KERNEL_SPECIMENS, ids=name_of)
def test_one_kernel_path_each_way(
    specimen: Specimen, dtype: torch.dtype, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that take everything. Tests of tensor-core kernels name tiers."""
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    kernel, element = kernels_of(specimen.operator), name_of(dtype)
    assert launched(specimen, dtype, gpu) == {
        f"{kernel}_forward/cuda/simt/{element}": 1,
        f"{kernel}_backward/cuda/simt/{element}": 1,
    }


@pytest.mark.parametrize(
    "specimen", [s for s in KERNEL_SPECIMENS if not s.arguments.get("gate")], ids=name_of
)
def test_deterministic_algorithms_select_the_deterministic_backward(
    specimen: Specimen, gpu: torch.device, deterministic: None
) -> None:
    kernel = kernels_of(specimen.operator)
    assert launched(specimen, torch.float32, gpu) == {
        f"{kernel}_forward/cuda/simt/float32": 1,
        f"{kernel}_backward/cuda/simt/deterministic/float32": 1,
    }


def test_backend_info_names_the_paths_of_this_gpu(gpu: torch.device) -> None:
    paths = mr.backend_info()["paths"]["attention"]["cuda"]
    for dtype in (torch.bfloat16, torch.float32):
        explained = mr.explain("attention", *[torch.randn(1, 1, 128, 128, dtype=dtype, device=gpu)] * 3)
        assert explained.forward == f"attention_forward/{paths[name_of(dtype)]}/{name_of(dtype)}"
