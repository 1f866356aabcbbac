"""What the Makefile removes and installs into is its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("no make")
    shutil.copy(MAKEFILE, tmp_path)
    for folder in ("build", "dist", "other.egg-info", "monoidreduce", ".venv/bin", ".venv-oldest"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)


def files(clone: Path) -> set[str]:
    return {str(file.relative_to(clone).parent) for file in clone.rglob("file")}


def test_clean_removes_what_make_made(clone: Path) -> None:
    everything = files(clone)
    assert make(clone, "clean").returncode == 0
    assert files(clone) == everything - {"build"}
    (clone / ".venv" / "torch.done").touch()
    assert make(clone, "clean").returncode == 0
    assert files(clone) == everything - {"build", ".venv/bin"}


def test_an_environment_of_somebody_else_is_left_alone(clone: Path) -> None:
    refused = make(clone, ".venv/created.done")
    assert refused.returncode != 0 and ".venv is there, and make has not made it" in refused.stdout
    assert "make VENV=FOLDER" in refused.stdout
    assert {path.name for path in (clone / ".venv").iterdir()} == {"bin"}
