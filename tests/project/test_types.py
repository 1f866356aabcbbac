"""The types that the public functions and modules show to users' type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.release
@pytest.mark.slow
def test_mypy_finds_the_types_of_calls() -> None:
    """In typed_calls.py each expression has the type that is asserted, and each wrong call is an error.

    With the Python version of `make lint`, whose cache has what torch declares.
    """
    pytest.importorskip("mypy")
    cached = ["--python-version=3.10", f"--cache-dir={ROOT / '.mypy_cache'}"]
    options = ["--strict", "--warn-unused-ignores", "--config-file=", *cached]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(ROOT / "tests/support/typed_calls.py")],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
