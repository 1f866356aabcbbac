"""Streams: Hopper's kernels, and what is launched around them, run where torch says and nowhere else."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from paths import takes, tensor_core_paths
from specimens import TENSOR_CORE_SPECIMENS, Specimen, name_of
from test_streams import SLEEP


@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_runs_behind_what_makes_its_inputs(
    specimen: Specimen, tier: str, gpu: torch.device, deterministic: None
) -> None:
    inputs = specimen.inputs(torch.bfloat16, gpu)
    grads = upstreams(specimen, inputs)
    expected, paths = results(specimen, inputs, grads), tensor_core_paths(specimen, inputs, tier)
    late = {name: torch.zeros_like(t) for name, t in inputs.items()}
    late_grads = [torch.zeros_like(g) for g in grads]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The stream has its memory then, and in it nothing that a kernel that comes too early should find.
        results(specimen, late, late_grads)
        stream.synchronize()
        torch.cuda._sleep(SLEEP)
        for t, values in zip((*late.values(), *late_grads), (*inputs.values(), *grads), strict=True):
            t.copy_(values)
        with takes(paths):
            got = results(specimen, late, late_grads)
        waited = stream.query()
    stream.synchronize()
    assert not waited, "the call returned only when its inputs were there"
    assert_same_bits(got, expected)
