"""docs/cost.md: its examples, its command, and the tables that bench/cost.py writes."""

from __future__ import annotations

import doctest
import re
import shlex

import pytest

from bench import cost as bench
from monoidreduce import _C
from monoidreduce.__main__ import main

TEXT = bench.PAGE.read_text("utf-8")
COMMANDS = re.findall(r"\$ python -m monoidreduce (.*)\n", TEXT)


def test_examples() -> None:
    examples = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "cost.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert failed == 0 and attempted >= 5


def test_tables_are_those_of_the_script() -> None:
    assert bench.page(TEXT) == TEXT


@pytest.mark.skipif(_C.cpu_isa() != "avx512bf16", reason="the tiles of another CPU")
def test_the_table_of_a_cpu_is_that_of_the_script() -> None:
    assert bench.cpu_page(TEXT) == TEXT


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert "backward: attention_backward" in capsys.readouterr().out
