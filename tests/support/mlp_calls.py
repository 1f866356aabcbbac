"""Arguments of MLP calls on a GPU, for tests of the tensor-core tiers and of TF32."""

from __future__ import annotations

import re

import torch
from calls import scaled_mlp_inputs
from specimens import Inputs, name_of
from tolerance import check_operator

import monoidreduce as mr

SIZES = {  # rows, hidden, width in, width out
    "one_tile": (128, 128, 64, 64),
    "one_row": (1, 520, 64, 64),
    "ragged": (301, 1000, 128, 128),
    "narrow": (77, 264, 8, 24),
    "unequal": (140, 328, 104, 40),
    "long": (700, 3000, 128, 120),
    "three_slabs": (200, 456, 192, 136),
    "wide": (200, 456, 256, 200),
}
PADDED_SIZES = {  # some or all sizes are no multiple of 8
    "smallest": (301, 1, 1, 1),
    "odd": (301, 1003, 59, 100),
    "rows": (301, 1000, 59, 64),
    "units": (301, 67, 64, 64),
    "outputs": (301, 1000, 64, 7),
    "wide": (200, 457, 250, 193),
    "one_row": (1, 521, 7, 59),
    "few_rows": (77, 9001, 100, 59),
}
SPLIT_SIZES = {  # few rows, so that kernels split the hidden units
    "one_row": (1, 16384, 128, 128),
    "one_tile": (64, 5000, 64, 64),
    "ragged": (129, 9000, 128, 120),
    "narrow": (77, 4104, 8, 24),
    "unequal": (300, 5064, 40, 104),
    "three_slabs": (100, 6000, 192, 136),
    "wide": (200, 5008, 256, 200),
    "long": (1000, 16384, 64, 64),
}


def inputs_of(size: str, dtype: torch.dtype, gpu: torch.device, biases: bool = False) -> Inputs:
    return scaled_mlp_inputs(SIZES[size], dtype, gpu, biases)


def many_rows(width: int, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    """Inputs with one row more than half of what three blocks of 128 rows on each multiprocessor take."""
    rows = 192 * torch.cuda.get_device_properties(gpu).multi_processor_count + 1
    return scaled_mlp_inputs((rows, 264, width, width - 8), dtype, gpu, biases=True)


def check(inputs: Inputs, activation: str, forward: str, backward: str) -> None:
    """Assert that a call keeps the rule, and that it takes kernels of these tiers and no others."""
    before = mr._C.path_counts()
    check_operator("mlp", inputs, {"activation": activation})
    after = mr._C.path_counts()
    ran = {path for path, n in after.items() if n != before.get(path, 0)}
    dtype = name_of(inputs["x"].dtype)
    assert ran == {f"mlp_forward/cuda/{forward}/{dtype}", f"mlp_backward/cuda/{backward}/{dtype}"}


def splits(inputs: Inputs) -> int | None:
    """The number of splits of the hidden units, as `mr.explain` says; None if rows are not few."""
    explanation = mr.explain("mlp", *(inputs[name] for name in ("x", "w1", "w2")))
    (reason,) = (reason for reason in explanation.reasons if reason.startswith("forward: "))
    found = re.search(r"few rows: tiles of \d+ rows, hidden units (?:in (\d+) splits|not split)$", reason)
    return int(found[1] or 1) if found else None


def split_inputs(
    size: str, gpu: torch.device, dtype: torch.dtype = torch.bfloat16, biases: bool = True
) -> Inputs:
    inputs = scaled_mlp_inputs(SPLIT_SIZES[size], dtype, gpu, biases)
    assert (splits(inputs) or 1) > 1
    return inputs
