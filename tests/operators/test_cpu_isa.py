"""The CPU engine in every instruction set that this build and this processor have.

The tests marked `isa` run here once more, in a process for each instruction set but the one of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from specimens import (
    DTYPES,
    Specimen,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    mlp_inputs,
    name_of,
)
from tolerance import check_operator, content

import monoidreduce as mr

# Several panels of rows and tiles of columns, the last of each not full, for any lanes of 2 to 16 rows.
RAGGED = (
    Specimen(
        "attention",
        "attention",
        attention_inputs,
        {"batch": 1, "heads": 2, "kv_heads": 1, "m": 97, "n": 257, "width": 33, "value_width": 35},
        {"causal": True, "return_lse": True},
    ),
    Specimen(
        "cross_entropy",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {"rows": 97, "classes": 509, "width": 33, "bias": True},
        {"reduction": "none", "return_lse": True},
    ),
    Specimen(
        "distillation",
        "linear_distillation",
        distillation_inputs,
        {"rows": 97, "classes": 509, "width": 33, "teacher_width": 35},
        {"reduction": "none", "teacher_grad": True},
    ),
    Specimen(
        "mlp", "mlp", mlp_inputs, {"rows": 97, "width": 33, "hidden": 257, "outputs": 35, "bias1": True}
    ),
    Specimen("logsumexp_few_rows", "logsumexp_matmul", logsumexp_inputs, {"rows": 5, "columns": 1025}),
    # Columns enough for each of three threads to have a slice of them.
    Specimen(
        "attention_slices",
        "attention",
        attention_inputs,
        {"batch": 1, "heads": 2, "kv_heads": 1, "m": 45, "n": 1001, "bias": (1, 2, 45, 1001)},
    ),
    Specimen(
        "cross_entropy_slices",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {"rows": 70, "classes": 1601, "width": 33, "bias": True},
        {"label_smoothing": 0.1},
    ),
    Specimen(
        "distillation_slices",
        "linear_distillation",
        distillation_inputs,
        {"rows": 70, "classes": 1601, "width": 33, "teacher_width": 35},
        {"teacher_grad": True},
    ),
    Specimen(
        "mlp_slices",
        "mlp",
        mlp_inputs,
        {"rows": 70, "width": 33, "hidden": 1001, "outputs": 35, "bias1": True},
    ),
    Specimen("logsumexp_slices", "logsumexp_matmul", logsumexp_inputs, {"rows": 70, "columns": 1601}),
)


@pytest.mark.isa
def test_the_instruction_set_is_the_one_asked_for_or_the_best() -> None:
    assert mr._C.cpu_isa() == (os.environ.get("MONOIDREDUCE_CPU_ISA") or mr._C.cpu_isas()[-1])


@pytest.mark.isa
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("specimen", RAGGED, ids=name_of)
def test_ragged_tiles_on_several_threads_twice(specimen: Specimen, dtype: torch.dtype) -> None:
    torch.set_num_threads(3)
    inputs = specimen.inputs(dtype, torch.device("cpu"))
    runs = []
    for _ in range(2):
        torch.manual_seed(0)  # of the upstream gradients
        runs.append(check_operator(specimen.operator, inputs, specimen.options))
    for name, first in runs[0].items():
        assert torch.equal(content(first), content(runs[1][name])), f"{name}: other bits in the second run"


@pytest.mark.isa
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", (86, 96, 239))
def test_the_number_of_threads_does_not_change_a_bit(n: int) -> None:
    """Of columns too few to be split between threads."""
    inputs = attention_inputs(1, 2, 1, 200, n, 64, 64, dtype=torch.float32, device=torch.device("cpu"))
    runs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)  # of the upstream gradients
        runs.append(check_operator("attention", inputs))
    for other in runs[1:]:
        for name, first in runs[0].items():
            assert torch.equal(content(first), content(other[name])), name


@pytest.mark.isa
def test_backward_finds_the_scores_of_forward() -> None:
    """Tiles differ between the passes. One key, in a last tile of few, weighs 1 by a large score."""
    inputs = attention_inputs(1, 2, 1, 40, 250, 256, 16, dtype=torch.float32, device=torch.device("cpu"))
    inputs["q"] += 1.0
    inputs["k"][:, :, 249] = 100.0  # scores of 1600, where others are of unit size
    check_operator("attention", inputs, {"scale": 1 / 16}, differentiate=["v"])
    inputs = cross_entropy_inputs(64, 300, 1024, dtype=torch.float32, device=torch.device("cpu"))
    check_operator("linear_cross_entropy", inputs, {"logit_scale": 20.0})


@pytest.mark.release
@pytest.mark.parametrize("isa", [isa for isa in mr._C.cpu_isas() if isa != mr._C.cpu_isa()])
def test_other_instruction_sets(isa: str, pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parents[1]
    files = [file for file in tests.glob("*/test_*.py") if "@pytest.mark.isa" in file.read_text("utf-8")]
    assert {file.parent.name for file in files} == {"operators", "folds"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "isa and not gpu"]
    process = subprocess.run(
        [*command, "-c", str(pytestconfig.inipath), *files],
        env={**os.environ, "MONOIDREDUCE_CPU_ISA": isa},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout
