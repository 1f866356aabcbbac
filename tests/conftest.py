"""Fixtures of the whole suite: the device, reproducible random numbers, deterministic hypothesis."""

from __future__ import annotations

import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import monoidreduce as mr

# What processes inherit from the one that starts pytest must not decide how a test ends: nohup, background
# jobs and some CI runners ignore SIGINT, and umasks and settings of the library differ.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.umask(0o022)
for _setting in ("MONOIDREDUCE_CUDA_TIER", "MONOIDREDUCE_DEBUG", "MONOIDREDUCE_PROGRESS"):
    os.environ.pop(_setting, None)
# cuBLAS is reproducible only with a workspace of its own; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# What Inductor compiled for another version of the operators' schemas is not to be found again.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

# MKL sets up its vector functions at the first call. Where two threads made it, half of a float64 logsumexp
# had errors of 2e-10, in 1 process of 10 (torch 2.13, Xeon with AMX). References need one thread to make it.
for _vectorized in (torch.exp, torch.log, torch.expm1, torch.log1p, torch.tanh):
    for _dtype in (torch.float32, torch.float64):
        _vectorized(torch.ones(1, dtype=_dtype))

_CACHED_BYTES = 1 << 30  # of a GPU, at most, by a process between its tests


def _cuda_usable() -> bool:
    return torch.cuda.is_available() and bool(mr._C.build_info()["cuda"])


hypothesis.settings.register_profile(
    "reproducible",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# The same for random functions of one's own on a GPU, whose kernels take minutes to compile:
# pytest --hypothesis-profile thorough tests/gpu/test_statistics.py -k random
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("reproducible"), max_examples=300
)
hypothesis.settings.load_profile("reproducible")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "isa: run once more for every other instruction set of the CPU (test_cpu_isa.py)"
    )


@pytest.fixture(
    scope="session",
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if _cuda_usable() else ["cpu"],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the operators run. A machine with a GPU runs every test a second time on it."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Each test has random numbers of its own, the same in every run and in any order."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU a test that asks for most of its memory has it alone, whatever processes run the other tests.

    A lock that tests share, and such a test does not. What a process has cached none of the others can have.
    """
    if not _cuda_usable():
        yield
        return
    import fcntl  # Unix's, as all machines are that run these tests

    gpu = torch.cuda.get_device_properties(0).uuid
    with (Path(tempfile.gettempdir()) / f"monoidreduce_tests_{gpu}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "memory" in request.fixturenames else fcntl.LOCK_SH)
        yield
        if torch.cuda.memory_reserved() > _CACHED_BYTES:
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def bitwise(request: pytest.FixtureRequest) -> Iterator[None]:
    """These tests compare bit by bit: on a GPU they ask for the deterministic mode, not for atomics."""
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device").type == "cuda"
    if not (
        on_gpu
        and request.node.nodeid.startswith(("tests/operators/test_edge_cases.py", "tests/torch_integration/"))
    ):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
