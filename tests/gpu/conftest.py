"""What only a GPU can show. The operators' own tests run on a GPU too, through the `device` fixture."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monoidreduce as mr


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_pycollect_makeitem(name: str, obj: object) -> list[pytest.Item] | None:
    """Without a GPU the files are imported, and their 10,000 tests are not made: that takes 20 seconds."""
    return [] if name.startswith("test_") and callable(obj) and not has_gpu() else None


def has_gpu() -> bool:
    return torch.cuda.is_available() and bool(mr._C.build_info()["cuda"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `tiers("sm80", "sm90")`, or whose file is, runs once for each of these."""
    named = metafunc.definition.get_closest_marker("tiers")
    if named is not None:
        metafunc.parametrize("tier", named.args, indirect=True)


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not has_gpu():
        pytest.skip("no CUDA device, or a build without CUDA")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def tier(request: pytest.FixtureRequest, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The tier whose kernels the test is for; None: whichever a call takes. sm80 runs on Hopper too."""
    named: str | None = getattr(request, "param", None)
    if named == "sm90" and torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("not a Hopper GPU")
    if named in ("sm80", "simt"):
        monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", named)
    return named


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest, tier: str | None) -> None:
    """Each test has random numbers of its own, the same in every run, in any order and for every tier."""
    name = request.node.name.replace(f"[{tier}]", "").replace(f"[{tier}-", "[")
    torch.manual_seed(zlib.crc32(name.encode()))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For tests that compare bits: without it, gradients are added in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def tf32(gpu: torch.device) -> Iterator[None]:
    """torch allows tf32. pytest's monkeypatch cannot undo an attribute of this module of torch."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def memory(request: pytest.FixtureRequest, turn: None) -> None:
    """Skips the test where the GPU has less free memory than the GiB that the test asks for."""
    gigabytes = request.param
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free >> 30} GiB are free")
