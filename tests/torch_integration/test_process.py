"""Forked and spawned processes, threads, hidden GPUs, failures: there is no state that they break."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from specimens import ONE_EACH, Specimen, name_of
from tolerance import as_outputs

import monoidreduce as mr


def run_python(code: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def work(seed: int) -> torch.Tensor:
    """Forward and backward of a loss that is large enough to use every thread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 64, generator=generator, requires_grad=True)
    weight = torch.randn(2048, 64, generator=generator)
    target = torch.randint(0, 2048, (256,), generator=generator)
    mr.linear_cross_entropy(x, weight, target).backward()
    return x.grad


FORKED = """
import os, torch, monoidreduce as mr
torch.set_num_threads({threads})
def work():
    torch.manual_seed(0)
    x, w = torch.randn(256, 64, requires_grad=True), torch.randn(2048, 64)
    mr.linear_cross_entropy(x, w, torch.arange(256)).backward()
    return x.grad
expected = work() if {used} else None
child = os.fork()
if child == 0:
    result = work()
    os._exit(0 if expected is None or torch.equal(result, expected) else 1)
assert os.waitpid(child, 0)[1] == 0
if expected is not None:
    assert torch.equal(work(), expected)
print("done")
"""


@pytest.mark.parametrize("used", [False, True], ids=["imported", "used"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_forked_child_computes_the_same(used: bool, threads: int) -> None:
    assert run_python(FORKED.format(threads=threads, used=used)) == "done"


IMPORTED_IN_A_CHILD = """
import os, signal, torch
torch.set_num_threads(4)
ones = torch.ones(1 << 22)
ones + ones  # the OpenMP runtime has threads, which a forked child will not have
child = os.fork()
if child == 0:
    signal.alarm(60)
    import monoidreduce as mr
    x, w = torch.randn(256, 64, requires_grad=True), torch.randn(2048, 64)
    mr.linear_cross_entropy(x, w, torch.arange(256)).backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="forks are told in /proc")
def test_a_forked_child_that_imports_the_library_first() -> None:
    assert run_python(IMPORTED_IN_A_CHILD) == "done"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_loops_run_on_torchs_threads() -> None:
    """torch's threads spin after its own loops, and would compete with others."""
    code = """
import ctypes, os, torch, monoidreduce as mr
torch.set_num_threads(3)
ones = torch.ones(1 << 22)
ones + ones
before = len(os.listdir("/proc/self/task"))
x, w = torch.randn(256, 64, requires_grad=True), torch.randn(2048, 64)
mr.linear_cross_entropy(x, w, torch.arange(256)).backward()
ones + ones
print(hasattr(ctypes.CDLL(None), "GOMP_parallel"), len(os.listdir("/proc/self/task")) - before)
"""
    loaded, more = run_python(code).split()
    if loaded == "False":
        pytest.skip("this torch has no OpenMP runtime of GNU's interface")
    assert int(more) == 0


def test_spawned_workers_compute_the_same() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.apply(work, (0,)), work(0))


def test_threads_may_call_at_once() -> None:
    expected = [work(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for ours, theirs in zip(pool.map(work, range(8)), expected, strict=True):
                assert torch.equal(ours, theirs)


def test_use_opens_no_cuda_context() -> None:
    code = """
import torch, monoidreduce as mr
x = torch.randn(3, 8, requires_grad=True)
mr.mlp(x, torch.randn(16, 8), torch.randn(8, 16)).sum().backward()
mr.explain("mlp", x, torch.randn(16, 8), torch.randn(8, 16))
print(torch.cuda.is_initialized())
"""
    assert run_python(code) == "False"


def test_gpus_hidden() -> None:
    code = "import monoidreduce as mr; print(mr.backend_info()['cuda_devices'])"
    assert run_python(code, CUDA_VISIBLE_DEVICES="") == "[]"


def test_import_loads_nothing_heavy() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import monoidreduce
heavy = ("torch._dynamo", "torch.utils.cpp_extension", "matplotlib", "tqdm", "monoidreduce.demo")
print([name for name in heavy if name in set(sys.modules) - before])
"""
    assert run_python(code) == "[]"


def test_errors_survive_optimised_bytecode() -> None:
    code = """
import torch, monoidreduce as mr
try:
    mr.mlp(torch.zeros(3, 8), torch.zeros(4, 7), torch.zeros(2, 4))
except ValueError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=300)
    assert process.stdout.strip() == "w1: expected shape [K, M=8] as x is [3, 8], got [4, 7]", process.stderr


def test_a_failed_call_leaves_the_next_one_alone(device: torch.device) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    target = torch.tensor([0, 1, 2], device=device)
    expected = mr.linear_cross_entropy(x, weight, target)
    with pytest.raises(ValueError, match="weight"):
        mr.linear_cross_entropy(x, weight[:, :7], target)
    with pytest.raises(IndexError, match="target"):
        mr.linear_cross_entropy(x.cpu(), weight.cpu(), target.cpu() + 4)
    assert torch.equal(mr.linear_cross_entropy(x, weight, target), expected)


def held_bytes(device: torch.device) -> int:
    """What the process holds: on a GPU, of its memory; else resident."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.release
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator keeps freed memory")
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_a_thousand_calls_leave_nothing_behind(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    operator = getattr(mr, specimen.operator)

    def run(times: int) -> None:
        for _ in range(times):
            result = operator(**leaves, **specimen.options)
            outputs = as_outputs(result)
            torch.autograd.grad([y.sum() for y in outputs], [t for t in leaves.values() if t.requires_grad])
            with pytest.raises(TypeError):
                operator(**leaves, **specimen.options, nonsense=1)

    run(100)  # what is made once
    before = held_bytes(device)
    run(1000)
    # The allocator may take some pages. One input or result kept by each call would be several MiB.
    assert held_bytes(device) - before <= 1 << 20
