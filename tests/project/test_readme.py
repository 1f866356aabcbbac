"""README.md: its examples run and leave no operator out, and the check runs its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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


def test_the_check_runs_the_readmes_commands_in_its_order(tmp_path: Path) -> None:
    """With a make that writes down what it is asked for; it ends at the first that fails."""
    script = README.parent / ".ci" / "run"
    if not script.exists():
        pytest.skip("these tests are not in a clone")
    (tmp_path / ".ci").mkdir()
    shutil.copy(script, tmp_path / ".ci")
    shutil.copy(README, tmp_path)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$1 $CMAKE_ARGS" >> made\n[ "$1" != "$FAILS" ]\n')
    make.chmod(0o755)
    path = os.pathsep.join([str(make.parent), os.environ["PATH"]])
    commands = re.findall(r"^    make (\w+)", README.read_text("utf-8"), re.MULTILINE)
    assert commands == ["demo", "test"]
    for fails, made, status in (("", commands, 0), ("demo", commands[:1], 1)):
        (tmp_path / "made").unlink(missing_ok=True)
        environment = {**os.environ, "PATH": path, "FAILS": fails, "CMAKE_ARGS": "-DX=1"}
        assert subprocess.run([tmp_path / ".ci/run"], env=environment, cwd="/").returncode == status
        asked = [line.split() for line in (tmp_path / "made").read_text("utf-8").splitlines()]
        assert asked == [[command, "-DMONOIDREDUCE_WERROR=ON", "-DX=1"] for command in made]
    (tmp_path / "README.md").write_text("    pip install .\n")
    assert subprocess.run([tmp_path / ".ci/run"], capture_output=True).returncode == 1
