"""Operands of the matrix products as the kernels have them: programs of their own, with probe matrices."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import monoidreduce as mr

SOURCES = Path(__file__).resolve().parents[1] / "cpp"
NVCC = shutil.which("nvcc", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH or in /usr/local/cuda/bin")
@pytest.mark.slow
@pytest.mark.tiers("sm80", "sm90")
def test_every_element_is_where_the_product_reads_it(tier: str, gpu: torch.device, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability(gpu)
    arch = "90a" if tier == "sm90" else f"{major}{minor}"
    program = tmp_path / "probe"
    flags = ["-std=c++20", "-O2", f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{mr.get_include()}"]
    subprocess.run([NVCC, *flags, SOURCES / f"test_operands_{tier}.cu", "-o", program], check=True)
    probe = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert probe.returncode == 0, probe.stdout + probe.stderr
