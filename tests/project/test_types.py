"""The types that the public functions and modules show to users' type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_mypy_finds_the_types_of_calls(tmp_path: Path) -> None:
    """In typed_calls.py each expression has the type that is asserted, and each wrong call is an error."""
    pytest.importorskip("mypy")
    options = ["--strict", "--warn-unused-ignores", "--config-file=", f"--cache-dir={tmp_path}"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(ROOT / "tests/support/typed_calls.py")],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
