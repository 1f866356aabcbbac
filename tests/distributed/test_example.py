"""examples/distributed: the script runs, and its losses equal the losses of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import monoidreduce as mr

SCRIPT = Path(__file__).parents[2] / "examples/distributed/sharded_head.py"


@pytest.mark.release
def test_a_head_over_two_processes_has_the_losses_of_one() -> None:
    found = os.environ | {"PYTHONPATH": str(Path(mr.__file__).parents[1])}  # the package that is tested
    command = [sys.executable, SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=found)
    assert "2 processes have the same losses: True" in run.stdout
    assert run.stdout.count("step ") == 8
    (difference,) = re.findall(r"largest relative difference (\S+)", run.stdout)
    assert float(difference) < 1e-12
