"""The kernels that a call takes, as `mr.explain` predicts and as `_C` counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from specimens import Inputs, Specimen

import monoidreduce as mr

# Tensors that the operators take as keyword arguments.
KEYWORDS = ("bias", "bias1", "bias2", "gate", "gate_bias", "mask", "sinks")


def explained(specimen: Specimen, inputs: Inputs) -> mr.Explanation:
    named = {name: t for name, t in inputs.items() if name in KEYWORDS}
    tensors = [t for name, t in inputs.items() if name not in KEYWORDS]
    return mr.explain(specimen.operator, *tensors, **named, **specimen.options)


def tensor_core_paths(specimen: Specimen, inputs: Inputs, tier: str | None = None) -> set[str]:
    """The paths of the call. Asserts that on a GPU their tier is `tier`; if None, any on tensor cores."""
    explanation = explained(specimen, inputs)
    paths = {explanation.forward, explanation.backward}
    tiers = {path.split("/")[2] for path in paths if "/cuda/" in path}
    assert "simt" not in tiers and (tier is None or tiers == {tier}), str(explanation)
    return paths


def counts() -> Counter[str]:
    """The number of times that operators took each path."""
    return Counter(mr._C.path_counts())


@contextmanager
def takes(paths: set[str]) -> Iterator[None]:
    """Assert that operators take these paths and no others in the block."""
    before = counts()
    yield
    taken = set(counts() - before)
    assert taken == paths, f"kernels of {sorted(taken)} were launched, expected {sorted(paths)}"


def runs_on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether operators take tensor-core kernels: 16-bit inputs and compute capability 8.0 or higher."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
