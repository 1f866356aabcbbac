"""Which device the kernels run on, and what is left behind by a call that fails."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from paths import takes, tensor_core_paths
from specimens import ONE_EACH, TENSOR_CORE_SPECIMENS, Specimen, name_of

import monoidreduce as mr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_tensors_of_another_device_than_the_current(
    specimen: Specimen, dtype: torch.dtype, deterministic: None
) -> None:
    inputs = specimen.inputs(dtype, torch.device("cuda:0"))
    grads = upstreams(specimen, inputs)
    expected = results(specimen, inputs, grads)
    there = {name: t.to("cuda:1") for name, t in inputs.items()}
    with torch.cuda.device(0):
        got = results(specimen, there, [g.to("cuda:1") for g in grads])
        assert torch.cuda.current_device() == 0
    assert {t.device for t in got.values()} == {torch.device("cuda:1")}
    assert_same_bits(got, {name: t.to("cuda:1") for name, t in expected.items()})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_tensor_cores_of_another_device_than_the_current(specimen: Specimen, deterministic: None) -> None:
    inputs = specimen.inputs(torch.bfloat16, torch.device("cuda:0"))
    grads = upstreams(specimen, inputs)
    expected = results(specimen, inputs, grads)
    there = {name: t.to("cuda:1") for name, t in inputs.items()}
    grads_there = [g.to("cuda:1") for g in grads]
    with torch.cuda.device(0), takes(tensor_core_paths(specimen, there)):
        got = results(specimen, there, grads_there)
        assert torch.cuda.current_device() == 0
    assert {t.device for t in got.values()} == {torch.device("cuda:1")}
    assert_same_bits(got, {name: t.to("cuda:1") for name, t in expected.items()})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_two_devices_are_refused() -> None:
    a, b = torch.randn(3, 4, device="cuda:0"), torch.randn(5, 4, device="cuda:1")
    with pytest.raises(ValueError, match="cuda:1"):
        mr.logsumexp_matmul(a, b)


def test_works_after_running_out_of_memory(gpu: torch.device) -> None:
    q = torch.randn(1, 1, 1, 8, device=gpu)
    with pytest.raises(torch.OutOfMemoryError):
        mr.attention(q.expand(1, 1, 2**37, 8), q, q)
    torch.testing.assert_close(mr.attention(q, q, q), q)
