"""Streams and graphs: the kernels run where torch says, wait for nothing and allocate nothing."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from paths import takes, tensor_core_paths
from specimens import ONE_EACH, SPECIMENS, TENSOR_CORE_SPECIMENS, Inputs, Specimen, name_of

SLEEP = 200_000_000  # GPU clock cycles, about 0.1 s: longer than any launch takes


def copied(inputs: Inputs) -> Inputs:
    return {name: t.clone() for name, t in inputs.items()}


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_runs_on_the_current_stream(specimen: Specimen, gpu: torch.device, deterministic: None) -> None:
    inputs = specimen.inputs(torch.float32, gpu)
    grads = upstreams(specimen, inputs)
    expected = results(specimen, inputs, grads)
    late = {name: torch.zeros_like(t) for name, t in inputs.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for name, t in late.items():  # on any other stream, the kernels would see zeros
            t.copy_(inputs[name])
        got = results(specimen, late, grads)
    stream.synchronize()
    assert_same_bits(got, expected)


@pytest.mark.tiers("sm80", "sm90")
@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_runs_behind_what_makes_its_inputs(
    specimen: Specimen, tier: str, gpu: torch.device, deterministic: None
) -> None:
    """The kernels of tensor cores, and what is launched around them."""
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


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_two_streams_at_once(specimen: Specimen, gpu: torch.device, deterministic: None) -> None:
    batches = [specimen.inputs(torch.float32, gpu) for _ in range(2)]
    grads = upstreams(specimen, batches[0])
    expected = [results(specimen, inputs, grads) for inputs in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    got = []
    for stream, inputs in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            got.append([results(specimen, inputs, grads) for _ in range(10)])
    torch.cuda.synchronize()
    for runs, one in zip(got, expected, strict=True):
        for run in runs:
            assert_same_bits(run, one)


@pytest.mark.parametrize("warm", (False, True), ids=("cold", "warm"))
@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_graph_capture(specimen: Specimen, warm: bool, gpu: torch.device, deterministic: None) -> None:
    """A captured forward and backward computes anew from what its inputs hold when it is replayed.

    Cold, our kernels are first launched in the capture. cuBLAS is not: torch can not create it there.
    """
    torch.mm(*torch.ones(2, 1, 1, device=gpu))
    static, fresh = specimen.inputs(torch.float32, gpu), specimen.inputs(torch.float32, gpu)
    grads = upstreams(specimen, static)
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results(specimen, static, grads)
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(specimen, static, grads)
    for inputs in (copied(static), fresh):
        for name, t in static.items():
            t.copy_(inputs[name])
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: t.clone() for name, t in captured.items()}
        assert_same_bits(replayed, results(specimen, inputs, grads))


@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_does_not_wait_for_the_device(specimen: Specimen, gpu: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, gpu)
    grads = upstreams(specimen, inputs)
    results(specimen, inputs, grads)  # the first launch of a kernel loads it, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(specimen, inputs, grads)
        done.record()
        waited = done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the call returned only when the device was idle"
