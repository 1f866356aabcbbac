"""README.md is short, and its examples run and leave no operator out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monoidreduce import functional

README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.oldest
def test_the_readmes_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(README)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert "linear_cross_entropy" in capsys.readouterr().out  # what mr.explain says


def test_the_readme_has_an_example_of_every_operator() -> None:
    examples = "\n".join(python_blocks(README))
    assert all(f"mr.{operator}(" in examples for operator in functional.__all__)
