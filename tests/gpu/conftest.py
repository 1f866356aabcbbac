"""What only a GPU can show. The operators' own tests run on a GPU too, through the `device` fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monoidreduce as mr


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not (torch.cuda.is_available() and mr._C.build_info()["cuda"]):
        pytest.skip("no CUDA device, or a build without CUDA")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def tier(request: pytest.FixtureRequest, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Whose kernels a file's tests are for, as its name ends: sm80's, which are asked for, or Hopper's."""
    named = request.node.path.stem.rpartition("_")[2]
    if named == "sm80":
        monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", named)
    elif named != "sm90":
        return None
    elif torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("not a Hopper GPU")
    return named


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For tests that compare bits: without it, gradients are added in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def memory(request: pytest.FixtureRequest, turn: None) -> None:
    """Skips the test where the GPU has less free memory than the GiB that the test asks for."""
    gigabytes = request.param
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free >> 30} GiB are free")
