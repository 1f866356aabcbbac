"""Memory layouts on tensor cores: what their kernels cannot read as it lies is copied, and stays there."""

from __future__ import annotations

import pytest
import torch
from paths import takes, tensor_core_paths
from specimens import LAYOUTS, TENSOR_CORE_SPECIMENS, Specimen, name_of
from tolerance import check_operator

pytestmark = pytest.mark.tiers("sm80", "sm90")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_layouts(specimen: Specimen, layout: str, tier: str, gpu: torch.device) -> None:
    inputs = {name: LAYOUTS[layout](t) for name, t in specimen.inputs(torch.bfloat16, gpu).items()}
    with takes(tensor_core_paths(specimen, inputs, tier)):
        check_operator(
            specimen.operator,
            inputs,
            specimen.options,
            differentiate=specimen.differentiable(inputs),
        )
