"""What docs/planner.md prints is what its examples and commands print."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from monoidreduce.__main__ import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ python -m monoidreduce (.*)\n((?:.*\n)*?)```", TEXT)


def test_examples() -> None:
    examples = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "planner.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert failed == 0 and attempted >= 30


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(("command", "printed"), COMMANDS)
def test_commands(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
