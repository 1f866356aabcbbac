"""The types that the public functions and modules show to users' type checkers."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import monoidreduce as mr
from monoidreduce import functional, varlen

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


@pytest.mark.parametrize(
    "function, keywords",
    (
        (mr.attention, functional.AttentionKeywords),
        (mr.attention_varlen, varlen.VarlenKeywords),
        (mr.linear_cross_entropy, functional.CrossEntropyKeywords),
    ),
    ids=lambda value: value.__name__,
)
def test_overloads_take_the_keywords_of_the_function(function: Any, keywords: Any) -> None:
    """Their TypedDict has the names and types that the function's own signature has."""
    parameters = inspect.signature(function).parameters.values()
    expected = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert expected.pop("return_lse") == "bool"
    assert {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()} == expected
